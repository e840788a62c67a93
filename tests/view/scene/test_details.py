"""What the details panel says of a box."""

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.view.scene.details import describe
from lazyviz.view.scene.scene import Scene


class Looped(nn.Module):
    """The same two layers three times, with functions of no layer between."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        for _ in range(3):
            x = self.b(torch.relu(self.a(x)))
        return x.exp().relu().relu()


@pytest.fixture(scope="module")
def scene():
    net = Looped()
    optimizer = torch.optim.AdamW(net.parameters())
    with lazyviz.lazy() as graph:
        net(torch.ones(4, 8)).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    return Scene(graph.ir, graph.plan())


def test_different_boxes_have_different_names_in_the_lists_of_the_details(scene):
    seen = set()
    for box in scene.hierarchy.boxes.values():
        details = describe(scene, box)
        lists = [details["flows"], *(row.get("readers", ()) for row in details["outputs"])]
        for links in lists:
            ids = {}
            for link in links:
                ids.setdefault(link["label"], set()).add(link["chain"][-1])
            assert all(len(same) == 1 for same in ids.values()), (box.label, ids)
            seen.update(ids)
    assert {"b", "b (1 of 3)", "b (3 of 3)", "net.a: mm", "net.a: add_ (2 of 2)"} <= seen
