"""Contents of module boxes, visible without a click."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz
from lazyviz.plan.units import format_bytes
from lazyviz.view.scene.box_contents import CARD_HEIGHTS, card, count_text, layer_kind, row
from lazyviz.view.scene.boxes import Box
from lazyviz.view.scene.scene import Scene


@pytest.fixture
def drawn():
    net = nn.Sequential(
        nn.Embedding(100, 64),
        nn.Linear(64, 512),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(512, 64),
        nn.LayerNorm(64),
    )
    optimizer = torch.optim.AdamW(net.parameters())
    words = torch.randint(0, 100, (8, 32))
    with lazyviz.lazy() as graph:
        loss = net(words).square().mean()
        loss.backward()
        optimizer.step()
    scene = Scene(graph.ir, graph.plan())
    told = {}
    for box in scene.hierarchy.boxes.values():
        if box.name and box.phase == "forward":
            told[box.name] = scene.box(box)
    return scene, told, (net, loss)


def test_a_card_has_class_shapes_parameters_and_what_is_held_at_the_peak(drawn):
    _, told, _ = drawn
    card = told["net.1"]
    assert (card["cls"], card["layer"]) == ("Linear", "linear")
    assert card["through"] == "8×32×64 → 8×32×512"
    assert card["params"] == "33.3 k params"
    assert card["size"][1] == CARD_HEIGHTS[2]
    made = dict(card["by"])
    assert made["activations"] == 8 * 32 * 512 * 4
    assert made["parameters"] == (64 * 512 + 512) * 4
    assert sum(made.values()) == card["held"]


def test_kinds_of_layers_are_distinguished(drawn):
    _, told, _ = drawn
    kinds = {name: card["layer"] for name, card in told.items()}
    assert kinds == {
        "net": "block",
        "net.0": "embedding",
        "net.1": "linear",
        "net.2": "activation",
        "net.3": "dropout",
        "net.4": "linear",
        "net.5": "norm",
    }


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Conv2d", "linear"),
        ("ConvTranspose3d", "linear"),
        ("Conv1D", "linear"),
        ("MultiheadAttention", "attention"),
        ("GPT2SdpaAttention", "attention"),
        ("LlamaRMSNorm", "norm"),
        ("BatchNorm2d", "norm"),
        ("NewGELUActivation", "activation"),
        ("LeakyReLU", "activation"),
        ("SiLU", "activation"),
        ("Softmax", "activation"),
        ("CrossEntropyLoss", "loss"),
        ("LSTM", "block"),
        ("ConvBlock", "block"),
    ],
)
def test_a_class_is_known_by_its_name(name, kind, drawn):
    scene, _, _ = drawn
    box = next(box for box in scene.hierarchy.boxes.values() if box.name == "net.1")
    facts = box.root.facts["1"]
    box.root.facts["1"] = type(facts)(name)
    try:
        assert layer_kind(box) == kind
    finally:
        box.root.facts["1"] = facts


def test_numbers_of_one_view_agree(drawn):
    scene, told, _ = drawn
    alive = {}
    for allocation in scene.plan.alive_at_peak:
        alive[allocation.category] = alive.get(allocation.category, 0) + allocation.nbytes
    lanes = [scene.box(lane) for lane in scene.hierarchy.lanes()]
    assert sum(lane.get("held", 0) for lane in lanes) == scene.plan.peak_bytes == sum(alive.values())
    model = scene.box(next(box for box in scene.hierarchy.boxes.values() if box.name == "net"))
    parts = [card for name, card in told.items() if name.count(".") == 1]
    assert model["held"] == sum(card.get("held", 0) for card in parts)
    assert format_bytes(model["held"])


def test_a_card_is_as_wide_as_its_loop_and_its_sync_points_need():
    net, x = nn.Linear(8, 8), torch.randn(4, 8)
    with lazyviz.lazy() as graph:
        for number_of_the_round in range(14):
            net(x).square().sum().mul(number_of_the_round).backward()
            x.sum().item()
    scene = Scene(graph.ir, graph.plan())
    frame = next(box for box in scene.hierarchy.boxes.values() if box.repeats == 14)
    width, _ = scene.size(frame)
    assert frame.label == "for number_of_the_round in range(14)" and width == 344
    box = max((each for each in frame.children if each.syncs), key=lambda each: each.syncs)
    assert scene.subtitle(box).endswith("sync points") and scene.size(box)[0] > 6.5 * len(scene.subtitle(box))


def test_a_long_path_and_a_long_gradient_have_room_for_their_names(drawn):
    layers = Box("module", "decoder.blocks.layers.0–2", "forward", None)
    layers.repeats = 3
    assert card(layers, 10, 100, "4×48×256 → 4×48×256")["size"][0] > 25 * 8.6 + 60
    weight = Box("input", "whisper.decoder.pos", "backward", None)
    assert row(weight, "64×256 · 64.0 KiB")["size"][0] > 19 * 8.6 + 17 * 6.4


def test_counts_are_short():
    assert [count_text(n) for n in (7, 999, 1000, 2_048_000, 70_600_000_000)] == [
        "7",
        "999",
        "1 k",
        "2.05 M",
        "70.6 B",
    ]


class GraphConvolution(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.lin = nn.Linear(width, out)

    def forward(self, x, edge_index):
        source, target = edge_index
        degree = torch.zeros(x.shape[0]).index_add(0, target, torch.ones(target.shape[0])).clamp(min=1)
        out = torch.zeros(x.shape[0], self.lin.out_features)
        return out.index_add(0, target, self.lin(x)[source]) / degree[:, None]


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = GraphConvolution(16, 8), GraphConvolution(8, 4)

    def forward(self, x, edges):
        return self.conv2(self.conv1(x, edges).relu(), edges)


class Decoder(nn.Module):
    def __init__(self, words, width):
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, tokens, encoded):
        x = self.embedding(tokens)
        return self.head(self.attention(x, encoded, encoded, need_weights=False)[0])


def through_of(net, *inputs):
    with lazyviz.lazy() as graph:
        result = net(*inputs)
    scene = Scene(graph.ir, graph.plan())
    found = next(box for box in scene.hierarchy.boxes.values() if box.name == "net")
    del result
    return scene.box(found)["through"]


def test_a_layer_shows_the_features_that_flow_through_it_and_not_the_indices_it_reads_first():
    x, edges = torch.randn(50, 16), torch.randint(0, 50, (2, 300))
    assert through_of(Convolutions(), x, edges) == "50×16 → 50×4"


def test_a_decoder_shows_the_shape_of_its_tokens_and_not_of_its_other_inputs():
    tokens, encoded = torch.randint(0, 40, (4, 6)), torch.randn(4, 9, 16)
    assert through_of(Decoder(40, 16), tokens, encoded) == "4×6 → 4×6×40"


class Noisy(nn.Module):
    """Reads the second of its inputs first, so that its gradient leaves the layer last."""

    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Linear(4, 16), nn.Linear(16, 16)

    def forward(self, x, time):
        scale = self.scale(time)[:, None]
        return torch.relu(self.linear(x)) + scale


class WithTime(nn.Module):
    def __init__(self):
        super().__init__()
        self.time, self.blocks = nn.Linear(4, 4), nn.ModuleList(Noisy() for _ in range(3))

    def forward(self, x, time):
        time = self.time(time)
        for block in self.blocks:
            x = block(x, time)
        return x


def backward_through(net, name, *inputs):
    with lazyviz.lazy() as graph:
        net(*inputs).square().mean().backward()
    scene = Scene(graph.ir, graph.plan())
    boxes = scene.hierarchy.boxes.values()
    found = next(box for box in boxes if box.name == f"net.{name}" and box.phase == "backward")
    return scene.box(found)["through"]


def test_a_backward_pass_shows_the_gradient_of_the_data_and_not_of_what_scales_it():
    x, time = torch.randn(8, 32, 16), torch.randn(8, 4)
    assert backward_through(WithTime(), "blocks.1", x, time) == "8×32×16 → 8×32×16"


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(500, 16), nn.LayerNorm(16), nn.Linear(16, 500)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        return self.head(self.norm(self.words(tokens)))


def test_a_backward_pass_shows_no_gradient_of_a_weight_that_another_layer_shares():
    tokens = torch.randint(500, (2, 8))
    assert backward_through(Tied(), "head", tokens) == "2×8×500 → 2×8×16"


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(16, 7)

    def forward(self, x, edges, graph_of):
        source, target = edges * 1
        gathered = torch.zeros(x.shape[0], 16).index_add(0, target, x[source])
        return self.lin(torch.zeros(8, 16).index_add(0, graph_of, gathered))


def test_a_layer_whose_result_begins_with_neither_size_shows_its_features():
    x, edges, graph_of = torch.randn(50, 16), torch.randint(50, (2, 300)), torch.arange(50) // 7
    assert through_of(Pooled(), x, edges, graph_of) == "50×16 → 8×7"


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16)) for _ in range(5))

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


def test_layers_that_are_folded_with_the_sums_after_them_have_their_class_and_parameters():
    net = Residual()
    with lazyviz.lazy() as graph:
        net(torch.randn(4, 16))
    boxes = Scene(graph.graph, graph.plan()).hierarchy.boxes.values()
    (fold,) = [box for box in boxes if box.repeats == 5]
    drawn = Scene(graph.graph, graph.plan()).box(fold)
    assert (drawn["label"], drawn["cls"]) == ("blocks.0–4", "Sequential")
    assert drawn["params"] == f"{count_text(sum(each.numel() for each in net.parameters()))} params"
