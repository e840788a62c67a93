"""Recording for an absent GPU: what a cell sees, and what can be planned."""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import warnings
import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lazyviz

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
CUDA = torch.device("cuda", 0)


def names(graph, phase=None):
    return [
        node.op._schema.name.removeprefix("aten::")
        for node in graph.nodes
        if phase is None or node.phase == phase
    ]


def on_gpu(graph):
    return all(
        value.device.type == "cuda" for node in graph.nodes if node.phase != "other" for value in node.outputs
    )


def train(model, batch, optimizer=None):
    loss = model(batch).float().square().mean()
    loss.backward()
    if optimizer is not None:
        optimizer.step()
    return loss


# --- what the cell sees ------------------------------------------------------------------------


def test_torch_cuda_answers_for_the_gpu_inside_the_block_only():
    with lazyviz.lazy(device="H100-80GB"):
        assert torch.cuda.is_available()
        assert torch.cuda.device_count() == 1
        assert torch.cuda.current_device() == 0
        assert torch.cuda.get_device_name() == "H100-80GB"
        assert torch.cuda.get_device_capability() == (9, 0)
        assert torch.cuda.get_device_properties(0).total_memory == 81559 * 2**20
        assert torch.cuda.is_bf16_supported()
        assert torch.accelerator.current_accelerator() == torch.device("cuda")
    assert not torch.cuda.is_available()
    assert torch.cuda.device_count() == 0
    with pytest.raises((AssertionError, RuntimeError), match="not compiled with CUDA|no NVIDIA driver"):
        torch.zeros(1, device="cuda")  # of a CPU build, of a CUDA build


def test_what_is_replaced_is_put_back_after_a_block_that_fails():
    before = {
        name: vars(torch.cuda)[name] for name in ("is_available", "Stream", "manual_seed", "memory_allocated")
    }
    methods = dict(vars(torch.Tensor))
    generator = torch.Generator
    with pytest.raises(ZeroDivisionError), lazyviz.lazy(device="H100-80GB"):
        raise ZeroDivisionError
    assert {name: vars(torch.cuda)[name] for name in before} == before
    assert dict(vars(torch.Tensor)) == methods
    assert torch.Generator is generator


def test_an_unknown_property_of_the_gpu_is_an_error_with_its_name():
    with (
        lazyviz.lazy(device="H100-80GB"),
        pytest.raises(lazyviz.AbsentDeviceError, match="multi_processor_count of H100"),
    ):
        torch.cuda.get_device_properties(0).multi_processor_count


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2).cuda(),
        lambda: torch.zeros(2).to("cuda"),
        lambda: torch.zeros(2).to(0),
        lambda: torch.zeros(2, device="cuda"),
        lambda: torch.tensor([1.0], device="cuda"),
        lambda: torch.as_tensor([1.0], device="cuda:0"),
        lambda: torch.randn(2, device="cuda").new_zeros(3),
        lambda: torch.zeros_like(torch.ones(2, device="cuda")),
        lambda: torch.zeros(2).pin_memory().cuda(non_blocking=True),
        lambda: torch.randn(2, device="cuda", generator=torch.Generator("cuda").manual_seed(1)),
    ],
)
def test_tensors_made_for_the_gpu_are_pending_on_it(make):
    with lazyviz.lazy(device="A100-40GB"):
        tensor = make()
        assert lazyviz.is_lazy(tensor)
        assert tensor.device == CUDA
        assert tensor.is_cuda and not tensor.is_meta and not tensor.is_cpu
        assert tensor.get_device() == 0
        assert "cuda:0, pending" in repr(tensor)
        assert tensor.cuda() is tensor and tensor.to("cuda") is tensor


def test_device_contexts_and_default_devices_make_tensors_there():
    with lazyviz.lazy(device="A100-40GB"):
        with torch.device("cuda"):
            assert nn.Linear(2, 2).weight.device == torch.tensor([1.0]).device == CUDA
        with torch.cuda.device(1):
            assert torch.zeros(2).cuda().get_device() == 1
        torch.set_default_device("cuda")
        try:
            assert torch.ones(2).device == CUDA
        finally:
            torch.set_default_device(None)
        assert torch.ones(2).device.type == "cpu"


def test_the_users_own_meta_tensors_stay_meta_tensors():
    with lazyviz.lazy(device="A100-40GB"):
        meta = torch.empty(3, device="meta")
        assert (meta + 1).is_meta
        assert F.rms_norm(meta, (3,)).is_meta
        assert torch.zeros(3, device="cuda").to("meta").is_meta


def test_tensors_on_two_devices_do_not_mix():
    said = "same device|two different devices"  # in torch 2.11
    with lazyviz.lazy(device="A100-40GB"), pytest.raises(RuntimeError, match=said):
        torch.ones(2, device="cuda") + torch.ones(2)


def test_moving_a_model_keeps_its_parameters_and_their_optimizer():
    with lazyviz.lazy(device="A100-40GB"):
        model = nn.Linear(4, 4)
        parameters = list(model.parameters())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model.cuda()
        assert all(one is other for one, other in zip(parameters, model.parameters()))
        assert all(isinstance(p, nn.Parameter) and p.is_leaf and p.is_cuda for p in model.parameters())
        train(model, torch.randn(2, 4).cuda(), optimizer)
        assert model.weight.grad.device == CUDA


def test_a_model_of_an_earlier_cell_can_be_trained_in_the_next():
    with lazyviz.lazy(device="A100-40GB"):
        model = nn.Linear(4, 4).cuda()
    assert model.weight.device == CUDA
    with lazyviz.lazy(device="A100-40GB") as graph:
        train(model, torch.randn(2, 4).cuda(), torch.optim.AdamW(model.parameters()))
    assert on_gpu(graph)
    assert graph.plan().by_category["parameters"] == 20 * 4


# --- what needs values -------------------------------------------------------------------------


def test_evaluating_is_refused_in_one_sentence_that_names_the_gpu():
    with lazyviz.lazy(device="H100-80GB") as graph:
        x = torch.ones(2, device="cuda")
    with pytest.raises(lazyviz.AbsentDeviceError, match=r"^[^.]*H100-80GB[^.]*not on this machine[^.]*\.$"):
        graph.evaluate()
    with pytest.raises(lazyviz.AbsentDeviceError):
        x.sum().item()
    assert graph.pending == len(graph.nodes)


def test_work_on_the_cpu_of_the_same_cell_can_be_evaluated():
    with lazyviz.lazy(device="H100-80GB") as graph:
        x = torch.arange(3.0)
        y = x.cuda() * 2
    graph.evaluate(x)
    assert x.tolist() == [0, 1, 2]
    assert lazyviz.is_lazy(y)


def test_a_cell_that_never_mentions_cuda_runs_as_always():
    model, x = nn.Linear(3, 3), torch.ones(2, 3)
    expected = model(x)
    with lazyviz.lazy(device="H100-80GB") as graph:
        y = model(x)
    assert graph.plan().device == "H100-80GB"
    graph.evaluate()
    assert torch.equal(y, expected)


def test_print_and_format_show_what_is_pending():
    with lazyviz.lazy(device="H100-80GB"):
        x = torch.randn(3, device="cuda")
        assert str(x) == repr(x) == f"{x}" == "lazy[3] float32 cuda:0, pending"
        assert f"{x.sum():.3f}" == "lazy[] float32 cuda:0, pending"


def test_another_read_stops_at_its_line_with_the_plan_so_far():
    with pytest.raises(lazyviz.AbsentDeviceError, match=r"item at .*test_fake_cuda.py:\d+.*--assume \d+="):
        with lazyviz.lazy(device="H100-80GB") as graph:
            x = torch.randn(3, device="cuda")
            float(x.sum())
    assert graph.plan().peak_bytes >= 12
    assert not torch.cuda.is_available()


def test_a_read_gives_what_the_user_assumes_for_its_line():
    line = _line_of("read = x.sum().item()")
    with lazyviz.lazy(device="H100-80GB", assume={line: 2.5, line + 1: True, line + 2: [1, 2]}) as graph:
        x = torch.randn(3, device="cuda")
        read = x.sum().item()
        chosen = "yes" if (x > 0).any() else "no"
        values = x.tolist()
    assert (read, chosen, values) == (2.5, "yes", [1, 2])
    assert "randn" in names(graph)


def test_an_assumed_number_is_formatted_and_has_the_type_of_what_is_read():
    with lazyviz.lazy(device="H100-80GB", assume={"*": 1.0}):
        x = torch.randn(3, device="cuda")
        count = (x > 0).sum()
        assert f"{x.sum():.3f} of {count:d}, {x.sum()}" == "1.000 of 1, 1.0"
        assert f"{x.sum():>6} {x.sum() > 0}" == "   1.0 1.0"
        assert type(count.item()) is int and x[: count.item()].shape == (1,)
        assert type(x.sum().item()) is float
    line = _line_of('shown = f"{x.sum():d}"')
    with lazyviz.lazy(device="H100-80GB", assume={line: 0.5, "*": [[1.0], [2.0]]}):
        x = torch.randn(3, device="cuda")
        shown = f"{x.sum():d}"
        assert shown == f"{x.sum():.1f}" == "lazy[] float32 cuda:0, pending"


def test_a_list_of_a_tensor_has_its_shape_and_what_is_known_of_it():
    with lazyviz.lazy(device="H100-80GB", assume={"*": 0.5}):
        x = torch.rand(2, 3, device="cuda")
        assert torch.arange(4, device="cuda").tolist() == [0, 1, 2, 3]
        found = x.tolist()
        assert found == [[0.5] * 3] * 2 and x.sum().tolist() == 0.5 and x[:0].tolist() == []
        found[0][0] = 7
        assert found[1][0] == 0.5


def _line_of(text):
    with open(__file__) as source:
        return next(number for number, line in enumerate(source, 1) if line.strip() == text)


def test_a_value_that_follows_from_constants_is_known_without_the_gpu():
    with lazyviz.lazy(device="H100-80GB") as graph:
        mask = torch.ones(2, 5, device="cuda", dtype=torch.long)
        assert bool((mask == 1).all())
        assert torch.arange(5, device="cuda")[2:].sum().item() == 9
        positions = torch.arange(5, device="cuda")
        assert positions[positions > 2].shape == (2,)
    assert not graph.sync_points


def test_memory_counters_tell_what_eager_tensors_would_take():
    with lazyviz.lazy(device="H100-80GB"):
        x = torch.zeros(256, device="cuda")
        assert torch.cuda.memory_allocated() == 1024
        y = x + 1
        del y
        assert torch.cuda.memory_allocated() == 1024
        assert torch.cuda.max_memory_allocated() == 2048
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 1024
        free, total = torch.cuda.mem_get_info()
        assert total - free == 1024
        with pytest.raises(lazyviz.AbsentDeviceError, match="memory_stats"):
            torch.cuda.memory_stats()


def test_the_allocators_counters_are_those_of_the_plan():
    with lazyviz.lazy(device="H100-80GB") as graph:
        x = torch.zeros(3 << 20, device="cuda")
        y = x @ x
        reserved = torch.cuda.memory_reserved()
        assert torch.cuda.max_memory_reserved() == reserved
        summary = torch.cuda.memory_summary()
    assert reserved == graph.plan().eager_reserved_bytes > x.nbytes + y.nbytes
    assert f"held by the allocator {reserved:,}" in summary and "Projected for H100-80GB" in summary


def test_pinned_memory_says_so_and_is_a_copy():
    with lazyviz.lazy(device="H100-80GB"):
        x = torch.ones(4)
        pinned = x.pin_memory()
        assert pinned.is_pinned() and not x.is_pinned()
        assert pinned.pin_memory() is pinned
        pinned.add_(1)
    assert x.tolist() == [1] * 4 and pinned.tolist() == [2] * 4


def test_an_unknown_gpu_is_planned_without_a_verdict():
    with lazyviz.lazy(device="cuda") as graph:
        torch.ones(2, device="cuda") * 2
    plan = graph.plan()
    assert plan.device == "cuda:0"
    assert plan.fits is None
    assert plan.peak_bytes == 16
    assert plan.verdict().startswith("Whether it fits is unknown: cuda:0 does not report its memory (")
    assert graph.plan(device="cuda").peak_bytes == 16
    with pytest.raises(lazyviz.AbsentDeviceError, match="recorded for an unknown CUDA GPU, which is"):
        graph.evaluate()


# --- programs ----------------------------------------------------------------------------------


def image_model():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    )


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2)


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2)), (4, 8)),
        (image_model, (2, 3, 16, 16)),
        (encoder, (2, 5, 16)),
        (lambda: nn.Sequential(nn.ConvTranspose2d(4, 2, 3, 2), nn.GroupNorm(1, 2)), (2, 4, 5, 5)),
        (lambda: nn.Sequential(nn.Conv1d(4, 2, 3), nn.InstanceNorm1d(2, affine=True)), (2, 4, 9)),
        (lambda: nn.RMSNorm(8), (4, 8)),
    ],
    ids=["mlp", "cnn", "transformer", "deconvolution", "instance norm", "rms norm"],
)
@pytest.mark.parametrize("kind", ["fused", "foreach", "capturable", "sgd"])
def test_a_training_step_lives_on_the_gpu(make, shape, kind):
    with lazyviz.lazy(device="A100-40GB") as graph:
        model = make().cuda()
        parameters = list(model.parameters())
        optimizer = {
            "fused": lambda: torch.optim.AdamW(parameters, fused=True),
            "foreach": lambda: torch.optim.AdamW(parameters),
            "capturable": lambda: torch.optim.AdamW(parameters, capturable=True),
            "sgd": lambda: torch.optim.SGD(parameters, 0.1, momentum=0.9),
        }[kind]()
        for _ in range(2):
            optimizer.zero_grad()
            train(model, torch.randn(*shape).cuda(), optimizer)
            nn.utils.clip_grad_norm_(parameters, 1.0)
    assert not graph.sync_points
    assert all(p.grad.device == p.device == CUDA and p.grad.shape == p.shape for p in parameters)
    assert all(
        value.device == CUDA for node in graph.nodes if node.phase == "backward" for value in node.outputs
    )
    ops = Counter(names(graph))
    assert ops["_foreach_norm"] == 2
    if kind == "fused":
        assert ops["_fused_adamw_"] == 2
    else:
        assert any(name.startswith("_foreach_") for name in names(graph, "optimizer"))
    assert graph.plan().fits


@pytest.mark.parametrize("build", ["there", "moved"])
def test_a_model_of_transformers_is_built_and_trained_without_memory(build):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=2,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )  # two of the eighty layers of Llama-3-70B
    with lazyviz.lazy(device="H100-80GB") as graph:
        if build == "there":
            with torch.device("cuda"):
                model = transformers.LlamaForCausalLM(config)
        else:
            model = transformers.LlamaForCausalLM(config).cuda()
        tokens = torch.randint(0, config.vocab_size, (1, 512), device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()
    parameters = sum(p.numel() for p in model.parameters())
    layer = 8192 * (8192 + 1024 + 1024 + 8192) + 3 * 8192 * 28672 + 2 * 8192
    assert parameters == 2 * layer + 2 * 8192 * 128256 + 8192
    plan = graph.plan()
    assert not graph.sync_points
    assert plan.by_category["parameters"] == plan.by_category["gradients"] == 4 * parameters
    assert plan.peak_bytes > 16 * parameters - 4 * 8192 * 128256
    assert plan.fits and not graph.plan("A100-40GB").fits


def test_a_vision_transformer_can_be_built_there_although_its_numbers_are_drawn_in_rounds():
    with lazyviz.lazy(device="A100-40GB") as graph, torch.device("cuda"):
        weight = nn.init.trunc_normal_(torch.empty(64, 64))
    assert weight.device == CUDA and not graph.sync_points
    assert Counter(names(graph))["normal_"] == 2


def test_grouped_products_take_float32():
    with lazyviz.lazy(device="H100-80GB"):
        x, w = torch.randn(12, 16, device="cuda"), torch.randn(3, 16, 8, device="cuda")
        ends = torch.tensor([4, 8, 12], device="cuda", dtype=torch.int32)
        assert F.grouped_mm(x, w, offs=ends).shape == (12, 8)


def test_several_gpus_in_one_cell():
    with lazyviz.lazy(device="A100-40GB"):
        first, second = nn.Linear(4, 4).to("cuda:0"), nn.Linear(4, 4).to("cuda:1")
        second(first(torch.randn(2, 4, device="cuda:0")).to("cuda:1")).sum().backward()
        assert first.weight.grad.get_device() == 0
        assert second.weight.grad.get_device() == 1


def test_each_device_of_a_cell_has_its_own_timeline():
    with lazyviz.lazy(device="A100-40GB") as graph:
        x = torch.zeros(1024, device="cuda:0")
        y = x.to("cuda:1")
        z = torch.cat([y, y])
        kept = z.cpu()
        del y, z
    plan = graph.plan()
    assert next(iter(plan.devices)) == "cuda:1"
    assert set(plan.devices) == {"cpu", "cuda:0", "cuda:1"}
    assert {name: own.peak_bytes for name, own in plan.devices.items()} == {
        "cuda:0": 4096,
        "cuda:1": 3 * 4096,
        "cpu": 2 * 4096,
    }
    assert plan.peak_bytes == plan.devices["cuda:1"].peak_bytes
    assert [size for _, size in plan.devices["cuda:0"].timeline] == [4096] * 4
    assert plan.devices["cuda:0"].capacity_bytes == plan.capacity_bytes == 40960 * 2**20
    assert plan.devices["cuda:0"].fits and plan.devices["cpu"].reserved_bytes is None
    assert "On cuda:0: 4.00 KiB at most" in plan.explain()
    assert "other kernels" not in plan.explain()
    assert kept.device.type == "cpu" and x.device.index == 0


def test_a_record_for_one_gpu_can_be_planned_for_another_and_says_so():
    with lazyviz.lazy(device="A100-40GB") as graph:
        torch.ones(3, device="cuda") * 2
    assert "may use other kernels" in graph.plan("H100-80GB").explain()


def test_dropout_keeps_a_mask_of_bytes_as_on_cuda():
    with lazyviz.lazy(device="A100-40GB") as graph:
        x = torch.randn(8, device="cuda", requires_grad=True)
        F.dropout(x, 0.5).sum().backward()
    assert "native_dropout" in names(graph)
    assert "native_dropout_backward" in names(graph)


def test_norms_and_softmax_are_the_fused_ones_of_cuda():
    with lazyviz.lazy(device="A100-40GB") as graph:
        x = torch.randn(4, 8, device="cuda", dtype=torch.float16, requires_grad=True)
        weight = torch.ones(8, device="cuda", dtype=torch.float16, requires_grad=True)
        y = F.rms_norm(x, (8,), weight)
        z = F.softmax(y, -1, dtype=torch.float32) + F.log_softmax(y, -1, dtype=torch.float32)
        z.sum().backward()
        assert z.dtype == torch.float32 and x.grad.dtype == torch.float16
    forward = [name for name in names(graph, "forward") if name != "detach"]
    assert forward == ["_fused_rms_norm", "_softmax", "_log_softmax", "add", "sum"]
    assert "_fused_rms_norm_backward" in names(graph)


def test_checkpointing_computes_again_on_the_gpu():
    with lazyviz.lazy(device="A100-40GB") as graph:
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).cuda()
        x = torch.randn(2, 4, device="cuda", requires_grad=True)
        for reentrant in (False, True):
            checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert Counter(names(graph))["native_dropout"] == 4


def test_hooks_retained_gradients_and_second_derivatives():
    with lazyviz.lazy(device="A100-40GB"):
        seen = []
        x = torch.randn(3, device="cuda", requires_grad=True)
        y = x**3
        y.retain_grad()
        y.register_hook(lambda gradient: seen.append(gradient.device))
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        gradient.sum().backward()
        y.sum().backward()
        assert y.grad.device == x.grad.device == CUDA
        assert seen == [CUDA, CUDA]


def test_a_deep_copy_is_a_model_of_its_own():
    with lazyviz.lazy(device="A100-40GB") as graph:
        model = nn.Linear(64, 64, bias=False).cuda()
        other = copy.deepcopy(model)
        assert isinstance(other.weight, nn.Parameter) and other.weight.device == CUDA
        assert other.weight is not model.weight
    assert graph.plan().by_category["parameters"] == 2 * 64 * 64 * 4


def test_state_dicts_go_to_and_fro():
    with lazyviz.lazy(device="A100-40GB"):
        model, other = nn.Linear(4, 4).cuda(), nn.Linear(4, 4).cuda()
        other.load_state_dict(model.state_dict())
        on_cpu = {key: value.cpu() for key, value in model.state_dict().items()}
        assert all(value.device.type == "cpu" for value in on_cpu.values())
        other.load_state_dict(on_cpu)


def test_batches_of_a_loader_go_to_the_gpu():
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with lazyviz.lazy(device="A100-40GB") as graph:
            model = nn.Linear(4, 2).cuda()
            for x, y in torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, pin_memory=True):
                F.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda()).backward()
    assert Counter(names(graph))["nll_loss_forward"] == 2


def test_activations_can_be_kept_on_the_host():
    with lazyviz.lazy(device="A100-40GB") as graph:
        x = torch.randn(64, device="cuda", requires_grad=True)
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            y = x.exp().sum()
        y.backward()
        assert x.grad.device == CUDA
    assert any(value.device.type == "cpu" for node in graph.nodes for value in node.outputs)


def test_inference_mode_takes_the_same_kernels():
    with lazyviz.lazy(device="A100-40GB") as graph, torch.inference_mode():
        q = torch.randn(1, 2, 8, 16, device="cuda", dtype=torch.bfloat16)
        result = F.scaled_dot_product_attention(q, q, q)
        assert result.is_inference() and result.device == CUDA
    assert "_scaled_dot_product_flash_attention" in names(graph)


def test_channels_last_convolutions_stay_channels_last():
    with lazyviz.lazy(device="A100-40GB"):
        model = nn.Conv2d(3, 8, 3).cuda().to(memory_format=torch.channels_last)
        x = torch.randn(2, 3, 8, 8, device="cuda").to(memory_format=torch.channels_last).requires_grad_()
        y = model(x)
        assert y.is_contiguous(memory_format=torch.channels_last)
        y.sum().backward()
        assert x.grad.is_contiguous(memory_format=torch.channels_last)


# --- autocast and its scaler --------------------------------------------------------------------


def test_autocast_casts_above_autograd_and_keeps_one_cast_of_each_parameter():
    with lazyviz.lazy(device="A100-40GB") as graph:
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).cuda()
        x = torch.randn(2, 4, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            first = model[0](x)
            y = model[1](first) + model[0](x)
            assert first.dtype == torch.bfloat16
            assert y.dtype == torch.float32
            assert torch.softmax(first, -1).dtype == torch.float32
            assert (first @ x.T).dtype == torch.bfloat16
            assert torch.cat([first, x]).dtype == torch.float32
            assert first.norm().dtype == torch.float32
        y.sum().backward()
        assert model[0].weight.grad.dtype == torch.float32
    weights = [
        node
        for node in graph.nodes
        if node.op is torch.ops.aten._to_copy.default
        and node.inputs[0].shape == (4, 4)
        and node.outputs[0].dtype == torch.bfloat16
    ]
    assert len(weights) == 1


def test_autocast_is_off_outside_of_its_context_and_for_the_cpu():
    with lazyviz.lazy(device="A100-40GB"):
        x = torch.randn(2, 2, device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
            with torch.autocast("cuda", enabled=False):
                assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.float32
        with torch.autocast("cuda"), pytest.raises(RuntimeError, match="unsafe to autocast"):
            F.binary_cross_entropy(torch.rand(3, device="cuda"), torch.ones(3, device="cuda"))


def test_checkpointing_casts_again_as_it_did():
    with lazyviz.lazy(device="A100-40GB") as graph:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).cuda()
        x = torch.randn(2, 4, device="cuda", requires_grad=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            y = checkpoint(model, x, use_reentrant=False)
        y.sum().backward()
    dtypes = [node.outputs[0].dtype for node in graph.nodes if node.op is torch.ops.aten.addmm.default]
    assert dtypes == [torch.bfloat16] * 3  # the second layer's result is not needed again


@pytest.mark.parametrize("fused", [False, True])
def test_a_gradient_scaler_finds_no_infinity(fused):
    with lazyviz.lazy(device="A100-40GB") as graph:
        model = nn.Linear(4, 4).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused or None)
        scaler = torch.amp.GradScaler("cuda", growth_interval=2)
        for _ in range(2):
            with torch.autocast("cuda", dtype=torch.float16):
                loss = model(torch.randn(2, 4, device="cuda")).sum()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == 2 * 65536
    assert not graph.sync_points
    assert any(name in ("_fused_adamw_", "_foreach_addcdiv_") for name in names(graph))


def test_the_lists_of_autocast_are_those_of_this_torch():
    import re
    from pathlib import Path

    from lazyviz.record.fake_cuda import autocast as ours

    # In torch 2.11; no dispatch mode can be given their arguments.
    of_named_dimensions = re.compile(r"\.(dim_)?[Dd]imname(List)?$|\.names_")
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text()
    lists = {
        "LOWER_PRECISION_FP": ours.LOWER_PRECISION,
        "FP32": ours.FLOAT32,
        "FP32_SET_OPT_DTYPE": ours.FLOAT32_RESULT,
        "PROMOTE": ours.WIDEST,
    }
    for macro, known in lists.items():
        body = re.search(
            rf"#define AT_FORALL_{macro}\(_\)(.*?)\n\n|#define AT_FORALL_{macro}\(_\)(.*?)\n#else", text, re.S
        )
        entries = re.findall(r"_\((\w+)(?:, (\w+))?\)", body.group(0).partition("\\")[2])
        listed = {f"{name}.{overload}" if overload else name for name, overload in entries}
        assert {name for name in listed if not of_named_dimensions.search(name)} <= set(known)
    everything = {name for known in lists.values() for name in known} | {
        "binary_cross_entropy",
        "norm.Scalar",
    }
    registered = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
        if name.startswith("aten::") and not of_named_dimensions.search(name)
    }
    # Not in torch 2.11 (there in the dtype of its arguments), and not before 2.15.
    everything -= {"rms_norm", "linalg_matrix_sqrth"} - registered
    # A CUDA build has one for cuDNN's layers, whose casts are made by `absent_recurrence`.
    assert registered - {"norm.ScalarOpt_dim", "_cudnn_rnn"} == everything


# --- attention ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "dtype", "options", "kernel"),
    [
        ("A100-40GB", torch.bfloat16, {"is_causal": True}, "flash"),
        ("A100-40GB", torch.bfloat16, {"mask": torch.bool}, "efficient"),
        ("A100-40GB", torch.float32, {"is_causal": True}, "efficient"),
        ("A100-40GB", torch.float64, {}, "math"),
        ("A100-40GB", torch.bfloat16, {"size": 512}, "efficient"),
        ("A100-40GB", torch.bfloat16, {"size": 20}, "flash"),
        ("A100-40GB", torch.float32, {"size": 6}, "math"),
        ("RTX-4090", torch.bfloat16, {"size": 200}, "efficient"),
        ("H100-80GB", torch.bfloat16, {"is_causal": True}, "cudnn"),
        ("H100-80GB", torch.float32, {}, "efficient"),
        ("H100-80GB", torch.bfloat16, {"size": 256}, "flash"),
        ("T4-16GB", torch.float16, {}, "efficient"),
        ("T4-16GB", torch.bfloat16, {}, "math"),
        ("V100-16GB", torch.float32, {"mask": torch.float32}, "efficient"),
    ],
)
def test_attention_takes_the_kernel_of_the_gpu(gpu, dtype, options, kernel):
    options = dict(options)
    size, mask = options.pop("size", 64), options.pop("mask", None)
    with lazyviz.lazy(device=gpu) as graph:
        q, k, v = (
            torch.randn(2, 4, 33, size, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)
        )
        if mask is not None:
            options["attn_mask"] = torch.ones(33, 33, dtype=mask, device="cuda")
        y = F.scaled_dot_product_attention(q, k, v, **options)
        assert y.shape == q.shape and y.dtype == dtype and y.device == CUDA
        y.sum().backward()
        assert q.grad.shape == q.shape
    used = {name for name in names(graph) if "attention" in name}
    expected = {f"_scaled_dot_product_{kernel}_attention", f"_scaled_dot_product_{kernel}_attention_backward"}
    assert used == (expected if kernel != "math" else set())
    assert not graph.sync_points


def test_the_user_may_choose_the_kernel_of_attention():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    used = []
    with lazyviz.lazy(device="H100-80GB") as graph:
        q = torch.randn(1, 2, 8, 16, device="cuda", dtype=torch.float16)
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
            with sdpa_kernel(backend):
                F.scaled_dot_product_attention(q, q, q)
            used.append([name for name in names(graph) if "attention" in name][-1:])
        with (
            sdpa_kernel(SDPBackend.FLASH_ATTENTION),
            pytest.raises(RuntimeError, match="No available kernel"),
        ):
            F.scaled_dot_product_attention(q.float(), q.float(), q.float())
    assert used[0] == ["_scaled_dot_product_flash_attention"]
    assert used[1] == used[2] == ["_scaled_dot_product_efficient_attention"]


def test_autocast_casts_for_rms_norm_where_this_torch_does():
    casts = torch._C._dispatch_has_kernel_for_dispatch_key("aten::rms_norm", "AutocastCUDA")
    with lazyviz.lazy(device="A100-40GB"), torch.autocast("cuda"):
        half = torch.ones(2, 4, device="cuda", dtype=torch.float16)
        assert F.rms_norm(half, (4,)).dtype == (torch.float32 if casts else torch.float16)


@pytest.mark.parametrize("options", [{}, {"torch_version": "2.1"}, {"assume": {"*": True}}])
def test_a_planned_graph_is_freed_with_the_last_reference_to_it(options):
    def planned():
        with lazyviz.lazy(device="RTX-4090", **options) as graph, torch.autocast("cuda"):
            x = torch.ones(4, 8, device="cuda")
            y = nn.LSTM(8, 8, device="cuda")(nn.Linear(8, 8, device="cuda")(x).softmax(-1))[0]
            y.sum().backward()
        assert graph.plan().peak_bytes
        return weakref.ref(graph.ir)

    reference = planned()
    gc.collect()
    assert reference() is None


IN_A_BLOCK = """
import torch, lazyviz
with lazyviz.lazy(device="RTX-4090"):
    x = torch.ones(4, device="cuda")
    import torch._inductor.lowering as lowering, torch._inductor.compile_fx
    assert torch.cuda.is_available() and lazyviz.is_lazy(x + torch.zeros_like(x))
kept = [key for key in lowering.lowerings if "Replacement" in type(key).__name__]
assert not kept and torch.tensor in lowering.lowerings, kept
"""


@pytest.mark.slow
def test_modules_of_pytorch_that_a_block_imports_keep_no_replacement():
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", IN_A_BLOCK], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
