"""Modules that are built, changed, moved, copied, and saved inside a block."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from ..lazy_equals_eager import both


def data():
    return torch.randn(4, 3)


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))


def train(model, x, steps=2, lr=0.1):
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
    return loss


# --- building -----------------------------------------------------------------------------

BUILT = {
    "linear": lambda: nn.Linear(3, 4),
    "convolutions": lambda: nn.ModuleList(
        [nn.Conv1d(2, 4, 3), nn.Conv2d(2, 4, 3, groups=2), nn.ConvTranspose2d(2, 4, 3)]
    ),
    "norms": lambda: nn.ModuleList([nn.BatchNorm2d(3), nn.LayerNorm(4), nn.GroupNorm(2, 4), nn.RMSNorm(4)]),
    "recurrent": lambda: nn.ModuleList([nn.LSTM(3, 4, 2, bidirectional=True), nn.GRUCell(3, 4)]),
    "attention": lambda: nn.MultiheadAttention(8, 2),
    "transformer": lambda: nn.Transformer(8, 2, 1, 1, 16, batch_first=True),
    "embedding": lambda: nn.Embedding(5, 3, padding_idx=0),
    "prelu and bilinear": lambda: nn.ModuleList([nn.PReLU(3), nn.Bilinear(2, 3, 4)]),
}


@pytest.mark.parametrize("name", BUILT)
def test_a_model_built_in_a_block_has_eagers_weights(name):
    graph = both(lambda: (BUILT[name](), torch.rand(2)), syncs=None)
    assert graph.sync_points == []


@pytest.mark.parametrize(
    "initialize",
    [
        nn.init.uniform_, nn.init.normal_, nn.init.ones_, nn.init.eye_, nn.init.xavier_uniform_,
        nn.init.xavier_normal_, nn.init.kaiming_uniform_, nn.init.kaiming_normal_, nn.init.trunc_normal_,
        nn.init.orthogonal_, lambda w: nn.init.sparse_(w, 0.5), lambda w: nn.init.constant_(w, 0.3),
    ],
)  # fmt: skip
def test_initializations(initialize):
    def program():
        layer = nn.Linear(4, 3)
        initialize(layer.weight)
        return layer

    both(program, syncs=None)


def test_training_a_model_built_in_the_block():
    def program(x):
        model = net()
        loss = train(model, x)
        return model, loss

    both(program, data, versions=False)


def test_parameters_and_buffers_registered_in_the_block():
    def program(x):
        model = nn.Module()
        model.weight = nn.Parameter(x * 2)
        model.register_buffer("mean", x.mean(0))
        model.register_parameter("none", None)
        model.extra = nn.ParameterDict({"a": nn.Parameter(torch.ones(2))})
        model.buffer = nn.Buffer(x + 1)
        (model.weight * model.mean).sum().backward()
        return (
            model,
            type(model.weight).__name__,
            isinstance(model.weight, nn.Parameter),
            [name for name, _ in model.named_parameters()],
        )

    def names_are_later_right(*args):
        model, _, *rest = program(*args)
        return model, *rest

    both(names_are_later_right, data)


# --- lazy modules -------------------------------------------------------------------------

LAZY = {
    "linear": (lambda: nn.LazyLinear(4), (5, 3)),
    "conv1d": (lambda: nn.LazyConv1d(4, 2), (2, 3, 5)),
    "conv2d": (lambda: nn.LazyConv2d(4, 2), (2, 3, 5, 5)),
    "conv3d": (lambda: nn.LazyConv3d(4, 2), (2, 3, 4, 4, 4)),
    "transposed": (lambda: nn.LazyConvTranspose2d(4, 2), (2, 3, 5, 5)),
    "batch norm 1d": (lambda: nn.LazyBatchNorm1d(), (5, 3)),
    "batch norm 2d": (lambda: nn.LazyBatchNorm2d(), (2, 3, 5, 5)),
    "batch norm 3d": (lambda: nn.LazyBatchNorm3d(), (2, 3, 4, 4, 4)),
    "instance norm": (lambda: nn.LazyInstanceNorm2d(affine=True), (2, 3, 5, 5)),
}


@pytest.mark.parametrize("name", LAZY)
@pytest.mark.parametrize("inside", [True, False], ids=["built inside", "built before"])
def test_modules_whose_shape_the_first_input_tells(name, inside):
    build, shape = LAZY[name]

    def program(*models):
        model = models[0] if models else build()
        x = torch.randn(shape)
        before = [type(p).__name__ for p in model.parameters()] if not inside else []
        loss = [model(x).pow(2).sum() for _ in range(2)][-1]
        loss.backward()
        return model, loss, before, type(model).__name__

    both(program, tuple if inside else build, versions=False)


def test_lazy_modules_in_a_network_that_trains():
    def program():
        model = nn.Sequential(
            nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(2)
        )
        x = torch.randn(3, 2, 6, 6)
        model(x)
        return model, train(model, x)

    both(program, versions=False)


def test_a_lazy_module_that_takes_a_state_dict():
    def program(source, x):
        model = nn.LazyLinear(4)
        model.load_state_dict({name: value * 2 for name, value in source.state_dict().items()})
        return model, model(x)

    both(program, lambda: (nn.Linear(3, 4), data()))


def test_a_lazy_module_without_shape_is_eagers_error():
    both(lambda: nn.LazyLinear(4).weight * 2)
    both(lambda: nn.LazyLinear(4).weight.shape)


# --- parametrizations, pruning, tying -----------------------------------------------------


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).t()

    def right_inverse(self, w):
        return w.triu()


PARAMETRIZED = {
    "weight_norm": lambda m: parametrizations.weight_norm(m),
    "spectral_norm": lambda m: parametrizations.spectral_norm(m),
    "orthogonal": lambda m: parametrizations.orthogonal(m),
    "orthogonal by cayley": lambda m: parametrizations.orthogonal(m, orthogonal_map="cayley"),
    "own": lambda m: parametrize.register_parametrization(m, "weight", Symmetric()),
    "two": lambda m: parametrizations.weight_norm(
        parametrize.register_parametrization(m, "weight", Symmetric())
    ),
}


@pytest.mark.parametrize("name", PARAMETRIZED)
@pytest.mark.parametrize("inside", [True, False], ids=["registered inside", "registered before"])
def test_parametrizations(name, inside):
    def make():
        layer = nn.Linear(3, 3)
        return (layer if inside else PARAMETRIZED[name](layer)), data()

    def program(layer, x):
        layer = PARAMETRIZED[name](layer) if inside else layer
        loss = train(layer, x)
        with parametrize.cached():
            out = layer(x) + layer(x)
        layer.eval()
        return loss, out, layer.weight, layer(x)

    both(program, make, syncs=None, versions=False)


def test_removing_and_assigning_parametrized_weights():
    def program(layer, x):
        parametrize.register_parametrization(layer, "weight", Symmetric())
        layer.weight = torch.arange(9.0).reshape(3, 3)
        out = layer(x)
        parametrize.remove_parametrizations(layer, "weight")
        return out, layer.weight, layer(x)

    both(program, lambda: (nn.Linear(3, 3), data()), syncs=None)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("old", [nn.utils.weight_norm, nn.utils.spectral_norm])
def test_the_old_norms(old):
    def program(layer, x):
        layer = old(layer)
        loss = train(layer, x)
        return loss, layer.weight, layer(x)

    both(program, lambda: (nn.Linear(3, 4), data()), syncs=None, versions=False)


@pytest.mark.parametrize(
    "cut",
    [
        lambda m: prune.l1_unstructured(m, "weight", 0.5),
        lambda m: prune.random_unstructured(m, "weight", 5),
        lambda m: prune.ln_structured(m, "weight", 0.5, n=2, dim=0),
        lambda m: prune.identity(m, "bias"),
        lambda m: prune.custom_from_mask(m, "weight", torch.eye(4, 3)),
        lambda m: prune.remove(prune.l1_unstructured(m, "weight", 0.5), "weight"),
    ],
)
def test_pruning(cut):
    def program(layer, x):
        cut(layer)
        return layer, train(layer, x), layer(x)

    both(program, lambda: (nn.Linear(3, 4), data()), syncs=None, versions=False)


@pytest.mark.parametrize("inside", [True, False])
def test_tied_weights(inside):
    def tie(model):
        model[3].weight = model[0].weight
        return model

    def build():
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 3))

    def program(model, x):
        model = tie(model) if inside else model
        loss = train(model, x)
        return loss, model[0].weight is model[3].weight, len(list(model.parameters()))

    both(program, lambda: (build() if inside else tie(build()), data()), versions=False)


# --- copying and saving -------------------------------------------------------------------


def tied_pending():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    return model


COPIES = {
    "deepcopy": (copy.deepcopy, set()),
    "copy": (copy.copy, set()),
    "pickle": (
        lambda m: pickle.loads(pickle.dumps(m)),
        {"storage access", "pickle"},
    ),
    "save": (
        lambda m: (lambda f: (torch.save(m.state_dict(), f), f.seek(0), torch.load(f))[2])(io.BytesIO()),
        {"storage access", "pickle"},
    ),
    "save a model": (
        lambda m: (lambda f: (torch.save(m, f), f.seek(0), torch.load(f, weights_only=False))[2])(
            io.BytesIO()
        ),
        {"storage access", "pickle"},
    ),
    "state_dict": (lambda m: m.state_dict(), set()),
    "clone of each": (lambda m: {name: p.clone() for name, p in m.named_parameters()}, set()),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_of_a_pending_model(name):
    copy_of, causes = COPIES[name]

    def program(x):
        model = tied_pending()
        model(x).sum().backward()
        twin = copy_of(model)
        with torch.no_grad():
            model[0].weight.zero_()
        tied = isinstance(twin, nn.Module) and twin[0].weight is twin[1].weight
        return model, twin, tied

    graph = both(program, data, syncs=None, versions=False)
    assert {point.cause for point in graph.sync_points} <= causes


def test_loading_a_state_dict_copies_or_assigns():
    def program(model, x):
        other = net()
        other.load_state_dict(model.state_dict())
        third = net()
        third.load_state_dict(model.state_dict(), assign=True)
        with torch.no_grad():
            model[0].weight.add_(1)
        return other, third, other(x), third(x), third[0].weight is model[0].weight

    both(program, lambda: (net(), data()), versions=False)


# --- moving -------------------------------------------------------------------------------

MOVES = {
    "double": lambda m: m.double(),
    "half": lambda m: m.half(),
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "float": lambda m: m.float(),
    "channels_last": lambda m: m.to(memory_format=torch.channels_last),
    "cpu": lambda m: m.cpu(),
    "type": lambda m: m.type(torch.float64),
    "there and back": lambda m: m.double().float(),
    "requires_grad_": lambda m: m.requires_grad_(False),
    "to_empty": lambda m: m.to_empty(device="cpu") and None,
    "share_memory": lambda m: m.share_memory(),
}


@pytest.mark.parametrize("swap", [False, True], ids=["by data", "by swapping"])
@pytest.mark.parametrize("built", ["before", "inside"])
@pytest.mark.parametrize("name", MOVES)
def test_moving_a_model_in_a_block(name, built, swap):
    def program(*models):
        torch.__future__.set_swap_module_params_on_conversion(swap)
        try:
            model = models[0] if models else nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))
            weight = model[0].weight
            moved = MOVES[name](model)
            if moved is None:
                return [tuple(p.shape) for p in model.parameters()], weight is model[0].weight
            x = torch.ones(2, 2, 4, 4, dtype=model[0].weight.dtype)
            out = model(x)
            if out.requires_grad:
                out.sum().backward()
            return model, out, weight is model[0].weight
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    def make():
        return () if built == "inside" else nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3))

    if name == "to_empty":  # its memory holds anything
        make_model = make()
        expected = program(*(make_model if isinstance(make_model, tuple) else (make_model,)))
        import lazyviz

        with lazyviz.lazy() as graph:
            made = make()
            result = program(*(made if isinstance(made, tuple) else (made,)))
        graph.evaluate()
        assert result == expected
        return
    both(program, make, syncs=None)


def test_moving_to_meta_and_filling_again():
    def program(model):
        weight = model[0].weight
        model.to("meta")
        facts = [(str(p.device), tuple(p.shape), p.requires_grad) for p in model.parameters()]
        model.to_empty(device="cpu")
        for p in model.parameters():
            nn.init.ones_(p)
        model[1].reset_running_stats()
        return facts, model, weight is model[0].weight

    both(program, net, syncs=None)

    def inside():
        return program(net())

    both(inside, syncs=None)


def test_moving_after_a_backward_moves_gradients():
    def program(model, x):
        model(x).sum().backward()
        model.double()
        model(x.double()).sum().backward()
        return model

    both(program, lambda: (net(), data()), syncs=None, versions=False)


def test_switching_requires_grad():
    def program(model, x):
        model[0].requires_grad_(False)
        y = (x * 2).requires_grad_()
        model(y).sum().backward()
        model[0].weight.requires_grad = True
        model(y).sum().backward()
        return y, model[0].weight.grad

    both(program, lambda: (net(), data()), versions=False)


def test_averaged_models_and_clipping():
    def program(model, x):
        averaged = torch.optim.swa_utils.AveragedModel(model)
        for _ in range(2):
            train(model, x, 1)
            averaged.update_parameters(model)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        nn.utils.clip_grad_value_(model.parameters(), 0.001)
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 2, model.parameters())
        return averaged.module, norm, vector

    both(program, lambda: (net(), data()), syncs=None, versions=False)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_attention_in_one_kernel_returns_weights_only_where_they_are_wanted(wanted, average):
    attention = nn.MultiheadAttention(8, 2, batch_first=True).eval()

    def program(x):
        with torch.no_grad():
            y, weights = attention(x, x, x, need_weights=wanted, average_attn_weights=average)
        return y, weights, weights is None

    both(program, lambda: torch.randn(2, 3, 8))


@pytest.mark.parametrize("size", [4, 20])
def test_pooling_of_one_sample_keeps_its_memory_format(size):
    def program(x):
        y, indices = nn.functional.max_pool3d(x, 2, return_indices=True)
        y.sum().backward()
        return y, indices, nn.functional.max_pool3d(x[:, 1:-1], 2, stride=1)

    def make():
        batch = torch.randn(1, 16, size, size, size).contiguous(memory_format=torch.channels_last_3d)
        return batch.squeeze(0).requires_grad_()

    both(program, make)
