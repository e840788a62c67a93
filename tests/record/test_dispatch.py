"""The C++ path from PyTorch's dispatcher to the recorder: the same calls, without affecting others."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import lazyviz
from lazyviz.graph.ir import TensorMeta
from lazyviz.record import lazy_tensor, native_recorder
from lazyviz.record.recorder import Recorder
from lazyviz.record.tape import tape
from lazyviz.torch_internals import private_api

from .test_native_recorder import described

pytestmark = pytest.mark.skipif(
    native_recorder._dispatcher is None, reason="no compiled dispatcher is installed"
)


@pytest.fixture(autouse=True)
def compiled():
    before = native_recorder.active
    native_recorder.use(True)
    yield
    native_recorder.use(before)


def recorded(program, compiled):
    """What is recorded of ``program`` the second time, when its operators have been taken."""
    native_recorder.use(compiled)
    for _ in range(2):
        with lazyviz.lazy() as graph:
            kept = program()
        said = described(graph)
        graph.evaluate()
    return said, kept


def arguments_of_all_kinds():
    x = torch.arange(24.0).reshape(2, 3, 4)
    image = torch.ones(1, 2, 4, 4)
    return [
        x * 2,
        x * 2.5,
        x * True,
        x * (1 + 2j),
        x.to(torch.float64),
        x.sum(dtype=torch.float64),
        x.sum((0, 2), keepdim=True),
        x.mean(-1),
        x.clone(memory_format=torch.contiguous_format),
        image.contiguous(memory_format=torch.channels_last),
        torch.zeros(2, 3, layout=torch.strided),
        torch.full_like(x, float("inf")),
        torch.full_like(x, -0.0),
        torch.add(x, x, alpha=3),
        torch.cat([x, x], 1),
        torch.stack((x, x)),
        x[torch.tensor([0, 1]), :, torch.tensor([1, 2])],
        torch.ops.aten.index_put(x, [None, torch.tensor([0])], torch.tensor(1.0)),
        torch.div(x, 3, rounding_mode="floor"),
        x.clamp(min=1),
        x.clamp(max=torch.tensor(2.0)),
        x.scatter_reduce(0, torch.zeros(1, 3, 4, dtype=torch.int64), x[:1], "amax"),
        torch.std_mean(x, 1, correction=2),
        torch.rand(3, generator=torch.Generator().manual_seed(0)),
        torch.arange(0, 10, 2),
        nn.functional.interpolate(image, scale_factor=1.5, mode="bilinear"),
        nn.functional.layer_norm(x, (4,)),
        nn.functional.conv2d(image, torch.ones(3, 2, 2, 2), stride=2, padding=1),
        torch._foreach_add([x, image], 2.0),
        torch.linalg.vector_norm(x, 3.0, [0, 1]),
        x.unbind(1),
    ]


def test_arguments_of_all_kinds_are_recorded_as_by_the_recorder_in_python():
    assert recorded(arguments_of_all_kinds, True)[0] == recorded(arguments_of_all_kinds, False)[0]


def test_they_do_come_this_way(monkeypatch):
    reached = []
    with lazyviz.lazy() as graph:
        arguments_of_all_kinds()
    graph.evaluate()
    in_python = native_recorder.RecorderMode.__torch_dispatch__

    def spy(mode, func, types, args=(), kwargs=None):
        reached.append(func)
        return in_python(mode, func, types, args, kwargs)

    monkeypatch.setattr(native_recorder.RecorderMode, "__torch_dispatch__", spy)
    with lazyviz.lazy() as graph:
        arguments_of_all_kinds()
    monkeypatch.undo()
    graph.evaluate()
    assert len(reached) < len(graph.nodes) / 2, reached


METAS = [
    TensorMeta((), (), 0, torch.float32, torch.device("cpu")),
    TensorMeta((2, 3), (3, 1), 0, torch.int64, torch.device("cpu")),
    TensorMeta((2, 3), (1, 4), 5, torch.bfloat16, torch.device("cpu")),
    TensorMeta((0, 3), (3, 1), 0, torch.bool, torch.device("cpu")),
    TensorMeta((4,), (0,), 1, torch.complex64, torch.device("cpu")),
]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("meta", METAS, ids=str)
def test_a_wrapper_is_the_one_that_pytorch_makes(meta, inference):
    def facts(made):
        storage = private_api.TensorBase.untyped_storage(made)
        return (
            type(made),
            torch._C._dispatch_keys(made).raw_repr(),
            made.shape,
            made.stride(),
            made.storage_offset(),
            made.dtype,
            private_api.TensorBase.device.__get__(made),
            made.layout,
            storage.nbytes(),
            storage.resizable(),
            storage.device,
            made.requires_grad,
            made.is_leaf,
            made.is_inference(),
            None if made.is_inference() else made._version,
        )

    with torch.inference_mode(inference):
        ours = native_recorder._module.wrapper(meta)
        theirs = private_api.make_wrapper_subclass(
            lazy_tensor.LazyTensor,
            meta.shape,
            meta.stride,
            meta.offset,
            None,
            meta.dtype,
            torch.strided,
            meta.device,
        )
    assert facts(ours) == facts(theirs)


def test_an_error_in_the_recorder_arrives_as_it_is(monkeypatch):
    class Odd(Exception):
        pass

    def program():
        return torch.rand(3)

    recorded(program, True)

    def fail(*args):
        raise Odd("of the generator")

    monkeypatch.setattr(Recorder, "_generator", fail)
    with lazyviz.lazy() as graph, pytest.raises(Odd, match="of the generator"):
        program()
    monkeypatch.undo()
    with lazyviz.lazy() as graph:  # nothing has been left behind
        y = program() + 1
    graph.evaluate()
    assert y.shape == (3,)


def test_other_modes_see_every_op():
    x, layer = torch.randn(4, 3), nn.Linear(3, 2)
    with FlopCounterMode(display=False) as eager:
        layer(x).sum().backward()
    for _ in range(3):
        with lazyviz.lazy() as graph, FlopCounterMode(display=False) as counted:
            layer(x).sum().backward()
        assert counted.get_total_flops() == eager.get_total_flops()
        graph.evaluate()


class Counting(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append((func, [type(item) for item in args], dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


class Reentrant(torch.Tensor):
    """A subclass whose products are computed anew, with a history."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, requires_grad=True)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        with torch.overrides.enable_reentrant_dispatch(), torch.enable_grad():
            inner = args[0].inner.clone().requires_grad_()
            result = func(inner, *args[1:], **(kwargs or {}))
        cls.history = type(result.grad_fn).__name__
        return result.detach()


def test_outside_blocks_everything_is_as_it_was():
    def program():
        x = torch.ones(2, 3)
        return torch.sum((x * 2.5).to(torch.float64), 0, keepdim=True, dtype=torch.float32)

    recorded(program, True)
    with Counting() as mode:
        program()
    assert [func for func, _, _ in mode.seen] == [
        torch.ops.aten.ones.default,
        torch.ops.aten.mul.Tensor,
        torch.ops.aten._to_copy.default,
        torch.ops.aten.sum.dim_IntList,
    ]
    assert mode.seen[1][1] == [torch.Tensor, float]
    assert mode.seen[3][2] == {"dtype": torch.float32}
    assert (Reentrant(torch.ones(3)) * 2.5).tolist() == [2.5, 2.5, 2.5]
    assert Reentrant.history == "MulBackward0"


def test_threads_that_do_not_record_run_eagerly():
    x = torch.ones(3)
    found = []

    def work():
        found.append((x * 3 + 1).tolist())

    recorded(lambda: x * 3 + 1, True)
    with lazyviz.lazy() as graph:
        y = x * 3 + 1
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert found == [[4.0, 4.0, 4.0]]
    assert len(graph.nodes) == 2
    graph.evaluate()
    assert y.tolist() == [4.0, 4.0, 4.0]


def test_results_that_autograd_saves_are_detached_without_python():
    def program():
        x = torch.ones(3, requires_grad=True)
        y = x.exp().tanh().sigmoid()
        y.sum().backward()
        return x.grad

    ours, kept = recorded(program, True)
    assert ours == recorded(program, False)[0]
    x = torch.ones(3, requires_grad=True)
    x.exp().tanh().sigmoid().sum().backward()
    assert torch.equal(kept, x.grad)


def test_a_tensor_is_an_ordinary_one_once_it_is_real():
    x = torch.ones(3, requires_grad=True)
    recorded(lambda: x * 2, True)
    with lazyviz.lazy() as graph:
        y = x * 2
    graph.evaluate()
    detached = y.detach()
    detached.add_(1)
    assert y.tolist() == [3.0, 3.0, 3.0]
    assert detached.grad_fn is None
    assert y._version == detached._version == 1
    assert type(detached) is torch.Tensor


def test_marks_of_a_profiler_are_not_part_of_the_program():
    layer = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        layer(torch.ones(4, 3)).sum().backward()
        optimizer.step()

    recorded(step, True)
    with lazyviz.lazy() as graph, torch.profiler.profile(acc_events=True) as profile:
        step()
    assert {"Optimizer.step#SGD.step", "Optimizer.zero_grad#SGD.zero_grad"} <= {
        event.name for event in profile.events()
    }
    assert not [node for node in graph.nodes if node.op.namespace == "profiler"]
    graph.evaluate()


@pytest.mark.parametrize(
    ("program", "special"),
    [
        (
            lambda: nn.functional.linear(
                torch.ones(2, 4, 3).transpose(0, 1), torch.ones(5, 3), torch.ones(5)
            ),
            "add_",
        ),
        (lambda: torch.ones(6, 2, 3) @ torch.ones(1, 3, 4), "bmm"),
        (lambda: nn.functional.linear(torch.ones(2, 4, 3), torch.ones(5, 3), torch.ones(5)), None),
        (lambda: nn.functional.linear(torch.ones(4, 3), torch.ones(5, 3), torch.ones(5)), None),
        (lambda: torch.ones(6, 2, 3) @ torch.ones(3, 4), None),
        (lambda: nn.functional.max_pool1d(torch.ones(2, 9, 4).transpose(1, 2), 3), "max_pool1d"),
        (
            lambda: nn.functional.max_pool1d(torch.ones(2, 9, 4, requires_grad=True).transpose(1, 2), 3),
            "max_pool2d_with_indices",
        ),
    ],
)
def test_composites_compute_as_eager_does(program, special):
    ours, kept = recorded(program, True)
    assert ours == recorded(program, False)[0]
    assert torch.equal(kept, program())
    names = [node["op"]._schema.name.removeprefix("aten::") for node in ours[0]]
    if special:
        assert special in names
    lazyviz.session.lazy_graph.reset()
    for name in ("linear", "matmul", "max_pool1d"):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "PythonTLSSnapshot")


def test_sizes_that_a_tracer_does_not_know_stay_unknown():
    recorded(lambda: torch.ones(2, 3, 4) @ torch.ones(2, 4, 5), True)
    graph = make_fx(torch.matmul, tracing_mode="symbolic")(torch.ones(2, 3, 4), torch.ones(2, 4, 5))
    assert graph(torch.ones(6, 3, 4), torch.ones(6, 4, 5)).shape == (6, 3, 5)
    sizes = {0: torch.export.Dim("n", min=2, max=100)}
    batch = torch.ones(7, 3, 4), torch.ones(7, 4, 5)
    exported = torch.export.export(Product(), batch, dynamic_shapes=(sizes, sizes))
    assert exported.module()(torch.ones(9, 3, 4), torch.ones(9, 4, 5)).shape == (9, 3, 5)


class Product(nn.Module):
    def forward(self, left, right):
        return left @ right


def test_kernels_that_are_taken_out_are_gone():
    def kernels():
        gc.collect()
        return sum(callable(item) and getattr(item, "__name__", "") == "_linear" for item in gc.get_objects())

    def cell():
        with lazyviz.lazy() as graph:
            nn.functional.linear(torch.ones(2, 3), torch.ones(4, 3))
        graph.evaluate()
        del graph
        lazyviz.session.lazy_graph.cell_boundary()
        gc.collect()
        return len(gc.get_objects())

    cell()
    count = kernels()
    assert count <= 1  # one is kept, perhaps by an earlier test
    cell()
    before = cell()
    for _ in range(5):
        after = cell()
    assert after <= before + 2
    assert kernels() == count


def test_an_operator_can_be_redefined():
    def define(schema, function):
        library = torch.library.Library("aten", "FRAGMENT")
        library.define(schema)
        library.impl("lazyviz_test", function, "CompositeExplicitAutograd")
        return library

    x = torch.ones(3)
    first = define("lazyviz_test(Tensor x, Tensor y, int a) -> Tensor", lambda x, y, a: x + y * a)
    for _ in range(3):
        with lazyviz.lazy() as graph:
            y = torch.ops.aten.lazyviz_test(x, x, 3)
        graph.evaluate()
    assert y.tolist() == [4.0, 4.0, 4.0]
    first._destroy()
    second = define("lazyviz_test(Tensor x) -> Tensor", lambda x: x * 7)
    with lazyviz.lazy() as graph:
        y = torch.ops.aten.lazyviz_test(x)
    graph.evaluate()
    assert y.tolist() == [7.0, 7.0, 7.0]
    second._destroy()


def test_a_graph_in_which_recording_an_op_failed_goes_like_another(monkeypatch):
    def program():
        return nn.functional.dropout(torch.ones(2) * 2, 0.5)

    def interrupt(*args):
        raise KeyboardInterrupt

    recorded(program, True)
    gone = []
    for _ in range(3):
        with lazyviz.lazy() as graph:
            with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
                patched.setattr(type(tape.generators), "record", interrupt)
                program()
            kept = torch.ones(2) * 3
        gone.append(weakref.ref(graph.ir))
        graph.evaluate()
        assert kept.tolist() == [3.0, 3.0]
    del graph
    lazyviz.session.lazy_graph.cell_boundary()
    gc.collect()
    assert [reference() for reference in gone] == [None, None, None]
