"""States of boxes: counted right whatever threads ask for them."""

import sys
import threading

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.view.scene.hierarchy import build_hierarchy
from lazyviz.view.scene.run_states import States


@pytest.fixture
def frequent_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_run_is_noted_while_another_thread_draws(frequent_switches):
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(4, 4), nn.ReLU())])
    with lazyviz.lazy() as graph:
        model(torch.ones(2, 4)).sum().backward()
    graph.evaluate()
    hierarchy = build_hierarchy(graph.ir)
    groups = {box.id for box in hierarchy.boxes.values() if box.is_group} | {hierarchy.root.id}
    expected = States(hierarchy).told(groups)
    assert expected
    for _ in range(100):
        states, together, errors = States(hierarchy), threading.Barrier(2), []

        def call(method, together=together, errors=errors):
            together.wait()
            try:
                method()
            except Exception as error:
                errors.append(error)

        methods = states.look, lambda states=states: states.told(groups)
        threads = [threading.Thread(target=call, args=(method,)) for method in methods]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert states.told(groups) == expected
