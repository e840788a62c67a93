"""Recurrent layers on an absent GPU: recorded as cuDNN kernels, with their memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz

CUDA = torch.device("cuda:0")
LAYERS = [nn.LSTM, nn.GRU, nn.RNN]


def names(graph):
    return [node.op._schema.name.removeprefix("aten::") for node in graph.nodes]


def storages(tensors):
    return {tensor._lazyviz.storage for tensor in tensors}


def metadata(item):
    if isinstance(item, torch.Tensor):
        return item.shape, item.dtype
    return [metadata(part) for part in item]


SHAPES = [
    {},
    {"num_layers": 3, "bidirectional": True},
    {"batch_first": True, "num_layers": 2, "dropout": 0.5},
    {"bias": False, "bidirectional": True},
    {"dtype": torch.float64, "batch_first": True},
]


@pytest.mark.parametrize("options", SHAPES, ids=str)
@pytest.mark.parametrize("layer", LAYERS)
def test_a_recurrent_layer_is_one_kernel_forward_and_one_backward(layer, options):
    def step(device):
        model = layer(3, 4, **options).to(device)
        x = torch.randn(6, 5, 3, device=device, dtype=options.get("dtype"), requires_grad=True)
        output, state = model(x)
        (output.sum() + (state[0] if layer is nn.LSTM else state).sum()).backward()
        return output, state, x.grad, [p.grad for p in model.parameters()], list(model.parameters())

    expected = step("cpu")
    with lazyviz.lazy(device="A100-40GB") as graph:
        found = step("cuda")
    assert metadata(found) == metadata(expected)
    assert found[0].device == found[2].device == CUDA
    for name in ("_cudnn_rnn_flatten_weight", "_cudnn_rnn", "_cudnn_rnn_backward"):
        assert names(graph).count(name) == 1
    assert found[0].transpose(0, 1).is_contiguous() == bool(options.get("batch_first"))
    assert "cell by cell" not in graph.plan().explain()


def test_an_lstm_with_projections_is_one_kernel():
    with lazyviz.lazy(device="A100-40GB") as graph:
        model = nn.LSTM(3, 8, 2, proj_size=5, bidirectional=True).cuda()
        output, (hidden, cells) = model(torch.randn(6, 4, 3, device="cuda"))
        output.sum().backward()
    assert output.shape == (6, 4, 10) and hidden.shape == (4, 4, 5) and cells.shape == (4, 4, 8)
    assert all(p.grad.shape == p.shape for p in model.parameters())
    assert names(graph).count("_cudnn_rnn_backward") == 1


@pytest.mark.parametrize("make", [lambda: nn.LSTM(3, 8).cuda(), lambda: nn.LSTM(3, 8, device="cuda")])
def test_its_weights_lie_in_one_buffer_which_counts_once_and_so_do_its_gradients(make):
    with lazyviz.lazy(device="A100-40GB") as graph:
        model = make()
        model(torch.randn(6, 4, 3, device="cuda"))[0].sum().backward()
        parameters = list(model.parameters())
    nbytes = sum(p.nbytes for p in parameters)
    (weights,), (gradients,) = storages(parameters), storages(p.grad for p in parameters)
    assert weights.nbytes == gradients.nbytes == nbytes
    sizes = graph.plan().at(len(graph.nodes) - 1).by_category
    assert sizes["parameters"] == sizes["gradients"] == nbytes
    assert len({p.storage_offset() for p in parameters}) == len(parameters)
    assert all(isinstance(p, nn.Parameter) and p.is_leaf for p in parameters)


def test_biases_have_their_place_in_the_buffer_in_use_or_not():
    with lazyviz.lazy(device="A100-40GB"):
        with_biases, without = nn.GRU(3, 8).cuda(), nn.GRU(3, 8, bias=False).cuda()
    (one,), (other,) = storages(with_biases.parameters()), storages(without.parameters())
    assert one.nbytes == other.nbytes


def test_weights_that_are_apart_are_gathered_by_every_call():
    with lazyviz.lazy(device="A100-40GB") as graph:
        model = nn.LSTM(3, 8).cuda()
        model.weight_hh_l0.data = torch.randn(32, 8, device="cuda")
        output = model(torch.randn(6, 4, 3, device="cuda"))[0]
    node = next(node for node in graph.nodes if node.op is torch.ops.aten._cudnn_rnn.default)
    assert output.shape == (6, 4, 8)
    assert node.args[3] is None and node.outputs[4].nbytes == sum(p.nbytes for p in model.parameters())
    with lazyviz.lazy(device="A100-40GB") as graph:
        model.flatten_parameters()
        model(torch.randn(6, 4, 3, device="cuda"))
    node = next(node for node in graph.nodes if node.op is torch.ops.aten._cudnn_rnn.default)
    assert node.outputs[4].storage is node.args[3].storage and node.args[3] is not None


@pytest.mark.parametrize("layer", LAYERS)
def test_nothing_is_kept_in_evaluation(layer):
    with lazyviz.lazy(device="A100-40GB") as graph, torch.no_grad():
        model = layer(3, 8, 2, dropout=0.5).cuda().eval()
        model(torch.randn(6, 4, 3, device="cuda"))
    assert not graph.plan().estimated
    node = next(node for node in graph.nodes if node.op is torch.ops.aten._cudnn_rnn.default)
    assert node.outputs[3].nbytes == 0


def test_the_state_of_dropout_is_made_once():
    with lazyviz.lazy(device="A100-40GB") as graph:
        model = nn.LSTM(3, 8, 2, dropout=0.5).cuda()
        x = torch.randn(6, 4, 3, device="cuda")
        model(x), model(x)
    assert names(graph).count("_cudnn_init_dropout_state") == 1
    assert graph.plan().peak_bytes > 2**21


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_takes_it_in_float16_as_pytorch_does(dtype):
    with lazyviz.lazy(device="A100-40GB") as graph:
        model = nn.GRU(3, 8).cuda()
        x = torch.randn(6, 4, 3, device="cuda", requires_grad=True)
        with torch.autocast("cuda", dtype=dtype):
            output, _ = model(x)
        output.sum().backward()
    assert output.dtype == torch.float16
    assert x.grad.dtype == torch.float32
    assert all(p.grad.dtype == torch.float32 and p.grad.shape == p.shape for p in model.parameters())
    node = next(node for node in graph.nodes if node.op is torch.ops.aten._cudnn_rnn.default)
    assert node.args[3].dtype == torch.float16
    assert 2 * node.args[3].nbytes == sum(p.nbytes for p in model.parameters())


@pytest.mark.parametrize("layer", LAYERS)
def test_what_cudnn_does_not_take_is_recorded_cell_by_cell_and_said(layer):
    def run(**options):
        with lazyviz.lazy(device="A100-40GB") as graph:
            layer(3, 4, **options).cuda()(torch.randn(5, 2, 3, device="cuda", **options))
        return graph

    with torch.backends.cudnn.flags(enabled=False):
        off = run()
    for graph in (off, run(dtype=torch.bfloat16)):
        assert "_cudnn_rnn" not in names(graph)
        said = f"{layer.__name__}: recorded cell by cell" in graph.plan().explain()
        assert said == (layer is not nn.RNN)  # a GPU has no kernel for its cell either


def test_what_is_kept_for_the_backward_pass_has_a_range():
    steps, batch, size = 50, 32, 256
    with lazyviz.lazy(device="A100-40GB") as graph:
        model = nn.LSTM(size, size, 2).cuda()
        output, _ = model(torch.randn(steps, batch, size, device="cuda"))
        output.sum().backward()
    plan = graph.plan()
    ((storage, need),) = plan.estimated.items()
    cell = steps * batch * size * 4 * 2  # a number a cell, in both layers
    assert 5 * cell == need.low < need.nbytes == storage.nbytes == 6 * cell < need.high
    low, high = plan.peak_range
    assert low < plan.peak_bytes < high
    assert high - low > need.high - need.low - 1
    assert plan.eager_peak_range[0] < plan.eager_peak_bytes < plan.eager_peak_range[1]
    assert plan.needed_range[0] < plan.needed_bytes < plan.needed_range[1]
    assert "what cuDNN saves for the backward pass" in plan.explain()


def test_tensors_on_other_devices_are_refused_with_pytorchs_message():
    with lazyviz.lazy(device="A100-40GB"):
        x = torch.randn(5, 2, 3, device="cuda")
        with pytest.raises(RuntimeError, match="not at the same device, found input tensor at cuda:0 and"):
            nn.LSTM(3, 4)(x)
        with pytest.raises(
            RuntimeError, match="not the same dtype, found input tensor with Float and hidden"
        ):
            nn.GRU(3, 4).cuda()(x, torch.zeros(1, 2, 4, device="cuda", dtype=torch.float64))


def test_checkpointing_calls_the_kernel_again():
    with lazyviz.lazy(device="A100-40GB") as graph:
        model = nn.LSTM(3, 4).cuda()
        x = torch.randn(5, 2, 3, device="cuda", requires_grad=True)
        torch.utils.checkpoint.checkpoint(lambda x: model(x)[0], x, use_reentrant=False).sum().backward()
    assert names(graph).count("_cudnn_rnn") == 2 and x.grad.shape == x.shape


def test_weights_are_trained_and_moved_as_they_are():
    with lazyviz.lazy(device="A100-40GB"):
        model = nn.LSTM(3, 4).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(5, 2, 3, device="cuda"))[0].sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        before = storages(model.parameters())
        model.load_state_dict(model.state_dict())
        assert storages(model.parameters()) == before
        assert [p.dtype for p in model.half().parameters()] == [torch.float16] * 4
        assert len(storages(model.parameters())) == 1


class Nothing(torch.autograd.Function):
    """Has no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def test_requested_gradients_are_returned():
    with lazyviz.lazy(device="A100-40GB"):
        x = torch.randn(5, 2, 3, device="cuda", requires_grad=True)
        frozen = nn.LSTM(3, 4).cuda().requires_grad_(False)
        frozen(x)[0].sum().backward()
        model = nn.LSTM(3, 4).cuda()
        model(x.detach())[1][1].sum().backward()
        bare = nn.GRU(3, 4).cuda()
        Nothing.apply(bare(x.detach())[0]).sum().backward()
    assert x.grad.shape == x.shape and all(p.grad is None for p in frozen.parameters())
    assert all(p.grad.shape == p.shape for p in model.parameters())


def test_a_second_backward_is_refused_with_pytorchs_message():
    with lazyviz.lazy(device="A100-40GB"):
        model, x = nn.LSTM(3, 4).cuda(), torch.randn(5, 2, 3, device="cuda", requires_grad=True)
        (first,) = torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
        with pytest.raises(NotImplementedError, match="derivative for '_cudnn_rnn_backward'"):
            first.sum().backward()
        with pytest.raises(RuntimeError, match="can only be called in training mode"):
            model.eval()(x)[0].sum().backward()
        with pytest.raises(RuntimeError, match="hx is not contiguous"):
            nn.GRU(3, 4, bidirectional=True).cuda()(x, torch.zeros(2, 2, 4, device="cuda").transpose(0, 1))


def test_pytorch_is_as_it_was_afterwards():
    before = nn.RNNBase.flatten_parameters, torch.backends.cudnn.is_acceptable
    with lazyviz.lazy(device="A100-40GB"):
        nn.LSTM(3, 4).cuda()(torch.randn(5, 2, 3, device="cuda"))
        assert torch.backends.cudnn.is_acceptable(torch.randn(1, device="cuda"))
    assert before == (nn.RNNBase.flatten_parameters, torch.backends.cudnn.is_acceptable)
    assert nn.LSTM(3, 4)(torch.randn(5, 2, 3))[0].shape == (5, 2, 4)


@pytest.mark.parametrize("how", [torch.no_grad, torch.inference_mode])
def test_without_gradients_it_is_one_kernel_too(how):
    with lazyviz.lazy(device="A100-40GB") as graph, how():
        output, _ = nn.GRU(3, 4).cuda()(torch.randn(5, 3, device="cuda"))
    assert output.shape == (5, 4) and names(graph).count("_cudnn_rnn") == 1


def test_the_copies_that_its_kernels_make_are_counted():
    """The input's transpose is copied on the way in and, twice, on the way back."""
    with lazyviz.lazy(device="A100-40GB") as graph:
        model = nn.LSTM(32, 64, batch_first=True).cuda()
        x = torch.randn(8, 50, 32, device="cuda")
        model(x)[0].sum().backward()
    plan = graph.plan()
    by_name = {graph.nodes[at].op._schema.name: need for at, need in plan.scratch.items()}
    assert by_name["aten::_cudnn_rnn"].low == x.nbytes
    gradient = 8 * 50 * 64 * 4  # the sum's, expanded: nothing that a copy could be left out of
    states = 2 * 8 * 64 * 4  # gradients of the last states, which nobody gave
    unwanted = x.nbytes + states  # computed, though nobody asked
    assert by_name["aten::_cudnn_rnn_backward"].low == x.nbytes + gradient + states + unwanted
