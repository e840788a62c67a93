"""PyTorch's tools in a block: compilers, tracers, profilers, and what ``torch.cuda`` has besides tensors.

On the CPU each has eager PyTorch's result.  On a planned GPU each is planned, or refused in one sentence that
says what to do.
"""

from __future__ import annotations

import functools
import io
import os
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import lazyviz

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present"),
    pytest.mark.filterwarnings("ignore"),  # many of these are deprecated
]


@pytest.fixture(autouse=True)
def fresh_compilers():
    torch.compiler.reset()
    with torch.jit.optimized_execution(False):
        yield
    torch.compiler.reset()
    lazyviz.reset()


def net(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(device)


def data(device):
    return torch.arange(24, dtype=torch.float32, device=device).reshape(3, 8) / 10


def leaf(device):
    return data(device).requires_grad_()


def compare(program):
    expected = program("cpu")
    with lazyviz.lazy():
        found = program("cpu")
    assert torch.equal(found.detach(), expected.detach())


# --- tracers ---------------------------------------------------------------------------


def traced_by_dynamo(device):
    return torch._dynamo.export(net(device))(data(device) * 1).graph_module(data(device))


def traced_to_aten(device):
    return torch._dynamo.export(net(device), aten_graph=True)(data(device) * 1).graph_module(data(device))


def compiled_ahead(device):
    from torch._functorch.aot_autograd import aot_function

    x = leaf(device)
    aot_function(lambda x: (x.sin() * 2).sum(), fw_compiler=lambda graph, inputs: graph)(x).backward()
    return x.grad


def module_compiled_ahead(device):
    from torch._functorch.aot_autograd import aot_module

    return aot_module(net(device), fw_compiler=lambda graph, inputs: graph)(data(device) * 1)


def compiled_by_functorch(device):
    from functorch.compile import compiled_function, nop

    return compiled_function(lambda x: x.cos(), fw_compiler=nop)(data(device) * 1)


def fused_by_functorch(device):
    from functorch.compile import memory_efficient_fusion

    return memory_efficient_fusion(lambda x: x.cos())(data(device) * 1)


def exported(device):
    return torch.export.export(net(device), (data(device) * 1,)).module()(data(device))


def exported_strictly(device):
    return torch.export.export(net(device), (data(device) * 1,), strict=True).module()(data(device))


def exported_as_draft(device):
    return torch.export.draft_export(net(device), (data(device) * 1,)).module()(data(device))


def traced_with_symbols(device):
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(lambda x: x.sin(), tracing_mode="symbolic")(data(device) * 1)(data(device))


def traced_alone(device):
    from torch.fx.experimental.proxy_tensor import get_isolated_graphmodule

    return get_isolated_graphmodule(lambda x: x.sin(), (data(device) * 1,), {})(data(device))


def linearized(device):
    return torch.func.linearize(torch.sin, data(device) * 1)[1](data(device))


def traced_by_torchscript(device):
    return torch.jit.trace_module(net(device), {"forward": (data(device) * 1,)})(data(device))


def traced_as_for_onnx(device):
    return torch.jit._get_trace_graph(net(device), (data(device) * 1,))[1]


def cut_into_stages(device):
    from torch.distributed.pipelining import SplitPoint, pipeline

    pipe = pipeline(net(device), (data(device) * 1,), split_spec={"2": SplitPoint.BEGINNING})
    found = pipe(data(device))
    return found[0] if isinstance(found, tuple) else found


def faked(device):
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = data(device) * 1
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x) @ torch.ones(8, 2)
    return torch.tensor(fake.shape)


TRACERS = [
    traced_by_dynamo,
    traced_to_aten,
    compiled_ahead,
    module_compiled_ahead,
    compiled_by_functorch,
    fused_by_functorch,
    exported,
    exported_strictly,
    exported_as_draft,
    traced_with_symbols,
    traced_alone,
    linearized,
    traced_by_torchscript,
    traced_as_for_onnx,
    cut_into_stages,
]


@pytest.mark.parametrize("program", TRACERS)
def test_a_tracer_has_eagers_result_and_refuses_planned_tensors_by_name(program):
    compare(program)
    with lazyviz.lazy(device="A100-40GB"):
        with pytest.raises(lazyviz.AbsentDeviceError, match="Tracing runs .* trace it on the CPU, and"):
            program("cuda")
        assert torch.equal(program("cpu"), program("cpu"))  # what is on the CPU can be traced beside them


def test_fake_tensors_of_planned_ones_are_refused_by_name():
    compare(faked)
    with (
        lazyviz.lazy(device="A100-40GB"),
        pytest.raises(lazyviz.AbsentDeviceError, match="tracing a program"),
    ):
        faked("cuda")


def test_onnx_exports_trace_on_the_cpu():
    with lazyviz.lazy(device="A100-40GB"):
        inputs = (net("cuda"), (data("cuda"),), io.BytesIO())
        with pytest.raises(lazyviz.AbsentDeviceError, match="trace it on the CPU"):
            torch.onnx.export(*inputs, dynamo=False)


@pytest.mark.slow
def test_inductor_is_imported_in_a_block_for_a_planned_gpu():
    program = (
        "import torch, lazyviz\n"
        "with lazyviz.lazy(device='A100-40GB') as graph:\n"
        "    x = torch.ones(3, device='cuda')\n"
        "    import torch._inductor.cudagraph_trees\n"
        "    assert torch.cuda.is_available() and torch.backends.cuda.is_built()\n"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr


# --- what is planned ---------------------------------------------------------------------


def symbolic(device):
    return torch.fx.symbolic_trace(net(device))(data(device) * 1)


def interpreted(device):
    return torch.fx.Interpreter(torch.fx.symbolic_trace(net(device))).run(data(device) * 1)


def scripted(device):
    return torch.jit.freeze(torch.jit.script(net(device).eval()))(data(device) * 1)


def forked(device):
    return torch.jit.wait(torch.jit.fork(torch.sin, data(device) * 1))


def explained(device):
    return torch.tensor(torch._dynamo.explain(net(device))(data(device) * 1).graph_count * 0)


def backward_compiled(device):
    x, model = leaf(device), net(device)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        model(x).sum().backward()
    return x.grad


def step_compiled(device):
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(data(device)).sum().backward()
    torch.compile(optimizer.step, backend="eager")()
    return model[0].weight


def functionalized(device):
    return torch.func.functionalize(lambda x: x.add_(1) * 2)(data(device) * 1)


def ensemble(device):
    parameters, _ = torch.func.stack_module_state([net(device) for _ in range(3)])
    base = net("meta")
    call = torch.vmap(lambda given, x: torch.func.functional_call(base, given, (x,)), (0, None))
    return call(parameters, data(device))


def prepared_for_quantized_training(device):
    quantization = torch.ao.quantization
    model = nn.Sequential(quantization.QuantStub(), net(device), quantization.DeQuantStub()).train()
    model.qconfig = quantization.get_default_qat_qconfig("x86")
    result = quantization.prepare_qat(model)(data(device) * 1)
    result.sum().backward()
    return result


def fused_for_inference(device):
    return torch.ao.quantization.fuse_modules(net(device).eval(), [["0", "1"]])(data(device) * 1)


def pruned(device):
    model = net(device)
    from torch.nn.utils import prune

    prune.l1_unstructured(model[0], "weight", 0.3)
    return model(data(device) * 1)


def flops(device):
    from torch.utils.flop_counter import FlopCounterMode

    model, x = net(device), data(device) * 1
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    return torch.tensor(counter.get_total_flops())


def profiled(device):
    with torch.profiler.profile(profile_memory=True, record_shapes=True, acc_events=True) as profile:
        result = net(device)(data(device) * 1)
    assert profile.key_averages().table()
    return result


def marked(device):
    if device == "cuda":
        torch.cuda.nvtx.range_push("a")
        torch.cuda.nvtx.range_pop()
        with torch.autograd.profiler.emit_nvtx(), torch.cuda.profiler.profile(), torch.cuda.nvtx.range("b"):
            return data(device) * 2
    return data(device) * 2


def checked_for_anomalies(device):
    x = leaf(device)
    with torch.autograd.detect_anomaly():
        (x * x).sum().backward()
    return x.grad


def saved_on_the_host(device):
    x = leaf(device)
    with torch.autograd.graph.save_on_cpu(pin_memory=device == "cuda"):
        y = (x * x).sum()
    y.backward()
    return x.grad


def saved_in_half(device):
    x = leaf(device)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
        y = (x * x).sum()
    y.backward()
    return x.grad


def checkpointed(device, **options):
    x = leaf(device)
    checkpoint(net(device), x, **options).sum().backward()
    return x.grad


def checkpointed_in_parts(device):
    x = leaf(device)
    checkpoint_sequential(net(device), 2, x, use_reentrant=False).sum().backward()
    return x.grad


def scaled(device):
    model = net(device)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler(device)
    scaler.scale(model(data(device)).sum()).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    scaler.load_state_dict(scaler.state_dict())
    return model[0].weight + scaler.get_scale() * 0


def streamed(device):
    x = data(device) * 2
    if device == "cuda":
        stream = torch.cuda.Stream(priority=-1)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            x = x + 0
        x.record_stream(stream)
        event = stream.record_event()
        stream.wait_event(event)
        with torch.Stream(device="cuda") as other:
            assert isinstance(other, torch.Stream)
        torch.Event(device="cuda", enable_timing=True).record(other)
        torch.accelerator.current_stream().synchronize()
    return x


PLANNED = [
    symbolic,
    interpreted,
    scripted,
    forked,
    explained,
    backward_compiled,
    step_compiled,
    functionalized,
    ensemble,
    prepared_for_quantized_training,
    fused_for_inference,
    pruned,
    flops,
    profiled,
    marked,
    checked_for_anomalies,
    saved_on_the_host,
    saved_in_half,
    functools.partial(checkpointed, use_reentrant=True),
    functools.partial(checkpointed, use_reentrant=False),
    functools.partial(checkpointed, use_reentrant=False, debug=True),
    functools.partial(
        checkpointed,
        use_reentrant=False,
        context_fn=functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default]),
    ),
    checkpointed_in_parts,
    scaled,
    streamed,
]


@pytest.mark.parametrize("program", PLANNED)
def test_a_tool_has_eagers_result_and_is_planned(program):
    compare(program)
    with lazyviz.lazy(device="A100-40GB") as graph:
        program("cuda")
    assert graph.plan().peak_bytes > 0


def test_what_is_planned_as_eager_says_so():
    with lazyviz.lazy(device="A100-40GB") as graph:
        backward_compiled("cuda")
    assert "compiled autograd: planned as run by eager PyTorch" in graph.plan().explain()


# --- torch.cuda ----------------------------------------------------------------------------


def test_memory_of_the_accelerator_is_that_of_the_planned_gpu():
    with lazyviz.lazy(device="A100-40GB"):
        x = torch.empty(1024, 1024, device="cuda")
        assert torch.accelerator.memory_allocated() == torch.cuda.memory_allocated() == x.nbytes
        assert torch.accelerator.max_memory_allocated() == x.nbytes
        assert torch.accelerator.memory_reserved() == torch.cuda.memory_reserved() > x.nbytes
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats()
        if hasattr(torch.accelerator, "get_memory_info"):
            assert torch.accelerator.get_memory_info() == torch.cuda.mem_get_info()


def test_settings_that_need_no_driver_are_answered():
    cuda = torch.cuda
    with lazyviz.lazy(device="A100-40GB"):
        cuda.reset_accumulated_memory_stats()
        cuda._sleep(100)
        cuda.set_sync_debug_mode("warn")
        assert cuda.get_allocator_backend() == "native"
        assert cuda.memory.get_per_process_memory_fraction() == 1.0
        cuda.set_per_process_memory_fraction(0.5)
        assert cuda.memory.get_per_process_memory_fraction() == 0.5


def captured():
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        data("cuda") * 2


def timed():
    start, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    start.elapsed_time(end)


REFUSED = {
    "CUDAGraph is not supported .* Plan the step without it": captured,
    "make_graphed_callables is not": lambda: torch.cuda.make_graphed_callables(net("cuda"), (data("cuda"),)),
    "graph_pool_handle is not supported": lambda: torch.cuda.graph_pool_handle(),
    "MemPool is not supported": lambda: torch.cuda.MemPool(),
    "ExternalStream is not supported": lambda: torch.cuda.ExternalStream(0),
    "get_stream_from_external is not supported": lambda: torch.cuda.get_stream_from_external(0),
    "priority_range.. is not supported": lambda: torch.cuda.Stream().priority_range(),
    "utilization is not supported": lambda: torch.cuda.utilization(),
    "memory_usage is not supported": lambda: torch.cuda.memory_usage(),
    "temperature is not supported": lambda: torch.cuda.temperature(),
    "list_gpu_processes is not supported": lambda: torch.cuda.list_gpu_processes(),
    "current_blas_handle is not supported": lambda: torch.cuda.current_blas_handle(),
    "cudart is not supported": lambda: torch.cuda.cudart(),
    "caching_allocator_alloc is not supported": lambda: torch.cuda.caching_allocator_alloc(512),
    "_record_memory_history .* graph.save": lambda: torch.cuda.memory._record_memory_history(),
    "_dump_snapshot .* graph.save": lambda: torch.cuda.memory._dump_snapshot(os.devnull),
    "memory_stats.. is not available": lambda: torch.cuda.memory_stats(),
    "torch.accelerator.*memory_stats.. is not available": lambda: torch.accelerator.memory_stats(),
    "elapsed_time.* plan.seconds": timed,
    "cufft_plan_cache.size is not supported": lambda: torch.backends.cuda.cufft_plan_cache.size,
    "tunable.enable is not supported": lambda: torch.cuda.tunable.enable(),
    "_create_jit_fn is not supported": lambda: torch.cuda.jiterator._create_jit_fn("T f(T x) { return x; }"),
    "DLPack at .* needs a value": lambda: torch.from_dlpack(data("cuda") * 2),
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_only_a_driver_could_do_is_refused_in_one_sentence(sentence):
    with lazyviz.lazy(device="A100-40GB"), pytest.raises(lazyviz.AbsentDeviceError, match=sentence):
        REFUSED[sentence]()


# --- what cuDNN takes ------------------------------------------------------------------------


def test_tangents_of_convolutions_differ_from_the_cpus_in_scratch_memory_alone():
    """Both convolve three times where a tangent is passed on; cuDNN's workspace is an estimate."""

    def tangent(device):
        layer = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1))
        parameters = {name: each.detach() for name, each in layer.to(device).named_parameters()}
        tangents = {name: torch.ones_like(each) for name, each in parameters.items()}
        x = torch.randn(8, 3, 32, 32, device=device)
        call = functools.partial(torch.func.functional_call, layer)
        return torch.func.jvp(lambda given: call(given, (x,)), (parameters,), (tangents,))

    with lazyviz.lazy() as here:
        kept = tangent("cpu")
    with lazyviz.lazy(device="A100-40GB") as there:
        planned = tangent("cuda")
    on_cpu, on_gpu = here.plan(), there.plan().devices["cuda:0"]
    at = max(on_cpu.eager_timeline, key=lambda entry: entry[1])[0]
    tensors = on_cpu.eager_peak_bytes - on_cpu.scratch[at].nbytes
    assert on_gpu.peak_bytes - on_gpu.scratch[on_gpu.peak_at].nbytes == tensors
    assert on_gpu.peak_range[0] <= on_cpu.eager_peak_bytes <= on_gpu.peak_range[1]
    assert "the scratch memory of some kernels is an estimate" in there.plan().explain()
    del kept, planned
