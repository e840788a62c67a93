"""Edge cases of planning for an absent GPU: what works, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
CUDA = torch.device("cuda", 0)


def names(graph):
    return [node.op._schema.name.removeprefix("aten::") for node in graph.nodes]


def test_a_model_built_in_a_device_context_changes_its_dtype():
    with lazyviz.lazy(device="H100-80GB") as graph:
        with torch.device("cuda"):
            model = nn.Linear(4, 4).to(torch.bfloat16)
            for p in model.parameters():
                p.data = p.data.half()
        torch.set_default_device("cuda")
        try:
            other = nn.Linear(4, 4).half()
        finally:
            torch.set_default_device(None)
        model(other.weight).sum().backward()
    assert {p.device for p in (*model.parameters(), *other.parameters())} == {CUDA}
    assert model.weight.grad.dtype == other.weight.dtype == torch.float16
    assert graph.plan().peak_bytes


# --- running the rest ---------------------------------------------------------------------------


@pytest.mark.parametrize("run", [lazyviz.evaluate, lazyviz.sync, lazyviz.mark_step])
def test_everything_else_can_be_run_while_something_is_planned(run):
    with lazyviz.lazy(device="H100-80GB") as planned:
        x = torch.arange(3.0)
        y = x.cuda() * 2
        back = y.cpu() + 1
    with lazyviz.lazy():
        z = torch.arange(3.0) + 1
    report = run()
    assert report.ops_run == 3
    assert x.tolist() == [0, 1, 2] and z.tolist() == [1, 2, 3]
    assert not lazyviz.is_lazy(z)
    assert lazyviz.is_lazy(y) and lazyviz.is_lazy(back)
    assert planned.pending
    with pytest.raises(lazyviz.AbsentDeviceError, match="H100-80GB"):
        planned.evaluate()
    with pytest.raises(lazyviz.AbsentDeviceError):
        lazyviz.evaluate(back)


# --- ways onto the GPU -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(3, device=0),
        lambda: torch.full((3,), 1.0, device=0),
        lambda: torch.empty_like(torch.ones(3), device=0),
        lambda: torch.ones(2).new_zeros(3, device=0),
        lambda: nn.Linear(2, 3, device=0).bias,
        lambda: torch.ones(3).type("torch.cuda.FloatTensor"),
        lambda: torch.ones(3, device="cuda").type(torch.cuda.FloatTensor),
        lambda: torch.cuda.FloatTensor(3),
        lambda: torch.cuda.FloatTensor([1.0, 2.0, 3.0]),
    ],
)
def test_numbers_and_old_types_mean_the_gpu(make):
    with lazyviz.lazy(device="A100-40GB"):
        made = make()
        assert made.device == CUDA and made.dtype == torch.float32 and made.shape == (3,)
        assert isinstance(made, torch.cuda.FloatTensor) and not isinstance(made, torch.cuda.HalfTensor)
        assert made.type() == "torch.cuda.FloatTensor"
    assert torch.ones(2).type(torch.float64).type() == "torch.DoubleTensor"


@pytest.mark.parametrize(
    "place",
    ["cuda", torch.device("cuda:0"), {"cpu": "cuda:0"}, lambda storage, location: storage.cuda()],
    ids=["name", "device", "mapping", "function"],
)
@pytest.mark.parametrize("old", [False, True], ids=["zip", "old format"])
def test_weights_are_loaded_onto_the_gpu(tmp_path, place, old):
    both = torch.arange(6.0)
    file = tmp_path / "weights.pt"
    torch.save(
        {"whole": both, "part": both[2:].view(2, 2).t(), "model": nn.Linear(8, 8).state_dict()},
        file,
        _use_new_zipfile_serialization=not old,
    )
    with lazyviz.lazy(device="A100-40GB") as graph:
        found = torch.load(file, map_location=place)
        model = nn.Linear(8, 8).cuda()
        model.load_state_dict(found["model"])
    part = found["part"]
    assert part.device == CUDA and part.stride() == (1, 2) and part.storage_offset() == 2
    assert not part._is_view()
    assert part.shape == (2, 2) and found["whole"].shape == (6,)
    on_gpu = graph.plan().devices["cuda:0"]
    assert on_gpu.peak_bytes == 6 * 4 + 2 * (8 * 8 + 8) * 4
    assert torch.load(file)["whole"].tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("weights_only", [True, False])
def test_weights_without_a_typed_storage_are_loaded_onto_the_gpu(tmp_path, weights_only):
    whole = torch.arange(6).to(torch.uint16)
    file = tmp_path / "weights.pt"
    torch.save({"whole": whole, "part": whole[2:]}, file)
    torch.load(file)  # the functions that it may call are looked up once
    with lazyviz.lazy(device="A100-40GB") as graph:
        found = torch.load(file, map_location="cuda", weights_only=weights_only)
    assert found["whole"].device == found["part"].device == CUDA
    assert found["part"].storage_offset() == 2 and found["part"].dtype == torch.uint16
    assert graph.plan().devices["cuda:0"].peak_bytes == 6 * 2
    assert torch.load(file, weights_only=weights_only)["part"].tolist() == [2, 3, 4, 5]


# --- layers that ask for values or a driver -----------------------------------------------------


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("lengths", [[5, 3, 3, 1], [1, 5, 2, 2], [4, 4, 4, 4]])
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_sequences_are_packed_by_lengths_on_the_host(batch_first, lengths, layer):
    def step(device, lengths):
        x = torch.randn(4, 5, 3, requires_grad=True)
        x = (x if batch_first else x.transpose(0, 1)).to(device).detach().requires_grad_()
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=batch_first, enforce_sorted=False)
        result = layer(3, 4, batch_first=batch_first).to(device)(packed)[0]
        padded, ends = nn.utils.rnn.pad_packed_sequence(result, batch_first, total_length=6)
        padded.sum().backward()
        return packed, padded, ends, x.grad

    expected = step("cpu", lengths)
    with lazyviz.lazy(device="A100-40GB"):
        found = step("cuda", lengths)
        assert found[0].batch_sizes.tolist() == expected[0].batch_sizes.tolist()
        assert found[2].device == expected[2].device and found[2].shape == expected[2].shape
    assert found[0].data.device == found[1].device == found[3].device == CUDA
    for ours, theirs in ((found[0].data, expected[0].data), (found[1], expected[1]), (found[3], expected[3])):
        assert (ours.shape, ours.stride()) == (theirs.shape, theirs.stride())


@pytest.mark.parametrize("batches", [[4, 3, 3, 1], [2, 2], [1]])
@pytest.mark.parametrize("batch_first", [False, True])
def test_a_planned_sequence_is_packed_as_aten_packs_it(batches, batch_first):
    from lazyviz.record.fake_cuda.packed_sequences import _Pack

    lengths = torch.tensor([sum(size > row for size in batches) for row in range(batches[0])])
    shape = (batches[0], len(batches), 2) if batch_first else (len(batches), batches[0], 2)
    x, y = (torch.arange(float(torch.Size(shape).numel())).view(shape).requires_grad_() for _ in range(2))
    expected, sizes = torch._VF._pack_padded_sequence(x, lengths, batch_first)
    found = _Pack.apply(y, batches, batch_first)
    assert sizes.tolist() == batches and torch.equal(found, expected)
    (expected * expected).sum().backward()
    (found * found).sum().backward()
    assert torch.equal(x.grad, y.grad) and x.grad.stride() == y.grad.stride()


def test_wrong_lengths_are_refused_as_on_a_gpu():
    with lazyviz.lazy(device="A100-40GB"):
        x = torch.randn(5, 2, 3, device="cuda")
        with pytest.raises(RuntimeError, match="sorted in decreasing order"):
            nn.utils.rnn.pack_padded_sequence(x, [2, 3])
        with pytest.raises(RuntimeError, match="1D CPU int64 tensor, but got 1D cuda:0 Long tensor"):
            nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2], device="cuda"))


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_data_parallel_over_one_gpu_is_the_model_itself(place):
    with lazyviz.lazy(device="A100-40GB") as graph:
        model = nn.DataParallel(nn.Linear(2, 3).cuda())
        x = torch.randn(4, 2, device=place, requires_grad=True)
        y = model(x)
        y.sum().backward()
        assert y.device == CUDA and x.grad.device.type == place
    assert names(graph).count("addmm") == 1


@pytest.mark.filterwarnings("ignore:.*(Sparse|nested)")
@pytest.mark.parametrize(
    ("what", "use"),
    [
        ("torch.cuda.CUDAGraph", lambda x: torch.cuda.CUDAGraph()),
        ("torch.cuda.memory_stats", lambda x: torch.cuda.memory_stats()),
        ("sparse", lambda x: torch.eye(4).to_sparse().cuda()),
        ("sparse", lambda x: torch.eye(4).to_sparse_csr().to("cuda")),
        ("nested_tensor", lambda x: torch.nested.nested_tensor([torch.ones(2)], device="cuda")),
    ],
)
def test_what_is_not_planned_is_named_in_one_sentence(what, use):
    with lazyviz.lazy(device="A100-40GB"):
        x = torch.randn(2, 3, device="cuda")
        with pytest.raises(lazyviz.AbsentDeviceError, match=what) as error:
            use(x)
    text = str(error.value)
    assert "not on this machine" in text and "assume" not in text and "\n" not in text


GRADIENTS = {
    "the largest": lambda x: x.max(),
    "the smallest": lambda x: x.min(),
    "median": lambda x: x.median(),
    "product": lambda x: x.prod(),
    "products": lambda x: x.prod(1).sum(),
    "fill": lambda x: torch.ones(6, 4, device="cuda").masked_fill(x > 0, x.sum()).sum(),
    "eigenvalues": lambda x: torch.linalg.eigvals(x @ x.t()).abs().sum(),
    "cholesky": lambda x: torch.cholesky(x @ x.t()).sum(),
    "reflectors": lambda x: torch.ormqr(x[:3, :3], x[0, :3], x[:3]).sum(),
    "least squares": lambda x: torch.linalg.lstsq(x, torch.ones(6, 2, device="cuda")).solution.sum(),
    "log of a sigmoid": lambda x: F.logsigmoid(x).sum(),
    "margins": lambda x: F.multi_margin_loss(x, torch.zeros(6, dtype=torch.int64, device="cuda")),
    "several margins": lambda x: F.multilabel_margin_loss(x, torch.zeros_like(x, dtype=torch.int64)),
    "repeated": lambda x: x.repeat_interleave(torch.ones(6, device="cuda").long(), 0, output_size=6).sum(),
    "smoothed classes": lambda x: F.cross_entropy(
        x, torch.zeros(6, dtype=torch.int64, device="cuda"), torch.ones(4, device="cuda"), label_smoothing=0.1
    ),
}


@pytest.mark.filterwarnings("ignore")  # torch.cholesky is deprecated
@pytest.mark.parametrize("loss", GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_that_depend_on_values_or_have_no_shape_rule_are_planned(loss):
    with lazyviz.lazy(device="RTX-3060") as graph:
        x = torch.ones(6, 4, device="cuda", requires_grad=True)
        loss(x).backward()
        assert x.grad.shape == x.shape
    plan = graph.plan()
    assert plan.eager_peak_bytes >= 2 * x.nbytes
    assert ("Assumed: the inputs of prod" in plan.explain()) == (
        loss in (GRADIENTS["product"], GRADIENTS["products"])
    )
    lazyviz.reset()


@pytest.mark.parametrize("rows", [3, 5])
@pytest.mark.parametrize("vector", [False, True])
def test_factors_and_solutions_on_a_gpu_have_the_shapes_of_its_drivers(rows, vector):
    def program(device):
        matrix, right = torch.randn(2, rows, 4, device=device), torch.randn(2, rows, 3, device=device)
        right = right[..., 0].contiguous() if vector else right
        return *torch.geqrf(matrix), *torch.linalg.lstsq(matrix, right, driver="gels")

    on_the_host = program("cpu")
    with lazyviz.lazy(device="RTX-3060"):
        for found, expected in zip(program("cuda"), on_the_host, strict=True):
            assert (found.shape, found.stride(), found.dtype) == (
                expected.shape, expected.stride(), expected.dtype
            )  # fmt: skip
    lazyviz.reset()


@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_matrix_is_made_on_a_gpu_from_the_host():
    with lazyviz.lazy(device="RTX-3060"):
        made = torch.sparse_coo_tensor([[0, 1], [1, 0]], torch.ones(2), (4, 4), device="cuda")
        assert made.is_sparse and made.device == CUDA
    lazyviz.reset()


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_ctc_loss_is_planned_with_lengths_that_are_known(place):
    with lazyviz.lazy(device="A100-40GB") as graph:
        scores = torch.randn(10, 3, 5, device="cuda", requires_grad=True)
        words = torch.ones(3, 4, dtype=torch.long, device="cuda")
        lengths = torch.full((3,), 10, device=place), torch.tensor([4, 2, 3], device=place)
        nn.CTCLoss()(scores.log_softmax(2), words, *lengths).backward()
    assert scores.grad.device == CUDA and "_ctc_loss_backward" in names(graph)
    kept = next(node for node in graph.nodes if node.name.startswith("_ctc_loss_")).outputs[1]
    assert kept.shape == (3, 10, 9)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (12,)], ids=str)
@pytest.mark.parametrize("place", ["cpu", "cuda", None], ids=str)
def test_ctc_loss_moves_targets_from_the_cpu(place, shape, dtype):
    with lazyviz.lazy(device="A100-40GB") as graph:
        scores = torch.randn(10, 3, 5, device="cuda", requires_grad=True)
        lengths: list[Any] = [[10] * 3, [4] * 3]
        if place is not None:
            lengths = [torch.tensor(each, dtype=dtype, device=place) for each in lengths]
        nn.CTCLoss()(scores.log_softmax(2), torch.ones(shape, dtype=dtype), *lengths).backward()
    assert not graph.sync_points
    kept = next(node for node in graph.nodes if node.name.startswith("_ctc_loss_")).outputs[1]
    assert kept.shape == (3, 10, 9) and kept.device == scores.grad.device == CUDA


@pytest.mark.parametrize(
    ("targets", "states", "words"),
    [((3, 4), 9, "as long as their padded length"), ((12,), 9, "have equal lengths")],
)
def test_ctc_loss_is_planned_with_the_longest_of_lengths_that_only_the_gpu_knows(targets, states, words):
    with lazyviz.lazy(device="A100-40GB") as graph:
        scores = torch.randn(10, 3, 5, device="cuda", requires_grad=True)
        wanted = torch.ones(targets, dtype=torch.long, device="cuda")
        lengths = torch.randint(1, 4, (3,), device="cuda")
        nn.CTCLoss()(
            scores.log_softmax(2), wanted, torch.randint(9, 10, (3,), device="cuda"), lengths
        ).backward()
    assert scores.grad.device == CUDA
    kept = next(node for node in graph.nodes if node.name.startswith("_ctc_loss_")).outputs[1]
    assert kept.shape == (3, 10, states)
    assert words in graph.plan().explain()


# --- which GPU ---------------------------------------------------------------------------------


def test_the_gpu_named_by_its_number_is_the_current_one():
    with lazyviz.lazy(device="cuda:1") as graph:
        assert torch.cuda.current_device() == 1 and torch.cuda.device_count() == 2
        x = torch.zeros(256).cuda()
        assert x.get_device() == torch.zeros(1, device="cuda").get_device() == 1
    assert graph.plan().device == "cuda:1" and graph.plan().peak_bytes == 1024 + 4


def test_a_block_for_another_absent_gpu_inside_of_one_is_refused():
    with lazyviz.lazy(device="A100-40GB") as outer:
        with lazyviz.lazy(device="A100-40GB"):
            torch.zeros(1, device="cuda")
        with pytest.raises(RuntimeError, match="H100-80GB inside one for A100-40GB"):
            with lazyviz.lazy(device="H100-80GB"):
                pass
        torch.zeros(1, device="cuda")
        assert torch.cuda.get_device_name() == "A100-40GB"
    assert len(outer.nodes) == 1


def test_the_properties_of_a_gpu_are_shown():
    with lazyviz.lazy(device="H100-80GB"):
        assert repr(torch.cuda.get_device_properties(0)) == (
            "_CudaDeviceProperties(name='H100-80GB', major=9, minor=0, total_memory=81559MB)"
        )


def test_pytorch_is_as_it_was_after_a_compiled_function_is_planned():
    before = dict(vars(torch.Tensor))
    with lazyviz.lazy(device="A100-40GB") as graph:
        x = torch.randn(2, 3, device="cuda")
        torch.compile(lambda x: x + 1, backend="eager")(x)
        x * 2
    assert names(graph)[-2:] == ["add", "mul"]
    del x
    lazyviz.session.lazy_graph.reset()
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    assert dict(vars(torch.Tensor)) == before
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1)).item() == 2


def test_jagged_tensors_are_trained():
    # PyTorch passes the device of these wrappers by position; autograd in C++ ends the process if it sees it.
    with lazyviz.lazy(device="H100-80GB") as graph:
        layer = nn.Linear(8, 8).cuda()
        rows = [torch.randn(5, 8), torch.randn(3, 8)]
        given = torch.nested.nested_tensor(rows, layout=torch.jagged, device="cuda", requires_grad=True)
        result = layer(given)
        assert given.device == result.device == result.values().device == CUDA
        (result * 2).values().sum().backward()
        assert given.grad is not None and layer.weight.grad.device == CUDA
    assert graph.plan().peak_bytes > layer.weight.nbytes
