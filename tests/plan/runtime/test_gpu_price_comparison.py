"""A graph on every known GPU: prices, bottlenecks, and the effect of changes."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazyviz
from lazyviz.plan.devices.known_gpus import PROFILES
from lazyviz.plan.runtime.bottlenecks_and_speedups import changes
from lazyviz.plan.runtime.gpu_price_comparison import compare_gpus, read_prices
from lazyviz.plan.runtime.last_training_step import last_step


class Attention(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 8, -1)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) / 8).softmax(-1)
        return self.out((scores @ v).transpose(1, 2).flatten(2))


def _record(device="A100-40GB", batch=8, steps=1, named=False):
    model = Attention()
    x = torch.randn(batch, 1024, 512)
    with lazyviz.lazy(device=device, batch=[x] if named else None) as graph:
        model.cuda()
        inputs = x.cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            optimizer.zero_grad()
            F.gelu(F.silu(model(inputs))).square().mean().backward()
            optimizer.step()
    return graph


def test_the_last_of_several_steps_is_distinguished():
    two = _record(steps=2)
    step = last_step(two.nodes)
    assert [node.phase for node in step].count("optimizer") * 2 == [n.phase for n in two.nodes].count(
        "optimizer"
    )
    assert {node.phase for node in step} >= {"forward", "backward", "optimizer"}


def test_a_single_step_begins_after_the_model_has_been_initialized():
    one = _record()
    step = list(last_step(one.nodes))
    moved = [node for node in one.nodes if node not in step]
    assert moved and all(value.storage.role == "parameter" for node in moved for value in node.outputs)
    assert len(moved) == len(list(Attention().parameters()))  # the batch's copy to the GPU is of the step
    with lazyviz.lazy(device="A100-40GB") as graph:
        torch.rand(64, 512).cuda().sort()
        model = Attention().cuda()
        model(torch.rand(8, 1024, 512).cuda()).sum().backward()
    assert last_step(graph.nodes)[0].name.startswith("rand_")
    assert {node.phase for node in last_step(graph.nodes)} >= {"forward", "backward"}
    weight = torch.nn.Parameter(torch.ones(8, 8))
    with lazyviz.lazy() as graph:  # no module is called, and a product views its weights
        F.linear(F.linear(torch.ones(2, 8), weight), weight).sum().backward()
    assert list(last_step(graph.nodes)) == list(graph.nodes)
    with lazyviz.lazy(device="A100-40GB") as graph:
        model = Attention().cuda()
    assert list(last_step(graph.nodes)) == list(graph.nodes)


def test_a_step_of_a_gan_is_that_of_both_its_networks():
    networks = [torch.nn.Linear(8, 8) for _ in range(2)]
    optimizers = [torch.optim.Adam(net.parameters(), foreach=False) for net in networks]

    def half(which):
        networks[1](networks[0](torch.randn(4, 8))).sum().backward()
        optimizers[which].step()
        optimizers[which].zero_grad()

    with lazyviz.lazy() as graph:
        for which in (0, 1, 0, 1, 0):
            half(which)
    step = last_step(graph.nodes)
    assert step[-1] is [node for node in graph.nodes if node.phase == "optimizer"][-1]
    assert [node.phase for node in step].count("forward") * 5 == 2 * [n.phase for n in graph.nodes].count(
        "forward"
    )
    with lazyviz.lazy() as graph:
        half(0), half(1)
    assert list(last_step(graph.nodes)) == list(graph.nodes)


def test_every_gpu_is_in_the_table_the_fastest_that_fits_first():
    table = compare_gpus(_record(named=True).plan(), prices={"h100 80gb": 3.6}, epoch=80)
    assert {each.name for each in table.gpus} == set(PROFILES)
    fitting = [each.time.seconds for each in table.gpus if each.fits]
    assert fitting == sorted(fitting)
    h100 = next(each for each in table.gpus if each.name == "H100-80GB")
    assert h100.cost(10) == pytest.approx(h100.time.seconds * 10 / 1000)
    text = table.table().text()
    assert "samples/s" in text and "cost per epoch" in text
    assert text.count("fits") == sum(each.fits for each in table.gpus)


def test_a_graph_in_which_no_kernel_runs_has_no_seconds_and_no_samples_per_second():
    with lazyviz.lazy(device="A100-40GB"):
        x = torch.ones(8, 3, device="cuda")
    with lazyviz.lazy(device="A100-40GB", batch=[x]) as graph:
        x.t()
    text = compare_gpus(graph.plan(), ["A100-40GB", "L4-24GB"], {"L4-24GB": 1.0}).table().text()
    assert text.count("no kernel runs") == 2 and " ns" not in text


def test_small_work_has_small_units():
    x = torch.randn(8, 16)
    with lazyviz.lazy() as graph:
        x @ x.t()
    plan = graph.plan(device="A100-40GB")
    assert "; 2.05 kFLOP, 1.25 KiB moved, MFU" in plan.explain()
    assert "2.05 kFLOP" in plan.time.table().text()


def test_what_autocast_leaves_in_float32_is_named_as_the_rest():
    with lazyviz.lazy(device="A100-40GB") as graph:
        net = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.LayerNorm(256)).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            net(torch.randn(8192, 256, device="cuda")).exp().sum().backward()
    assert "the rest of the forward and backward pass in bfloat16: " in graph.plan().explain()


def test_unanswerable_questions_are_refused(tmp_path):
    with pytest.raises(ValueError, match="needs a batch"):
        compare_gpus(_record().plan(), ["L4-24GB"], epoch=10)
    with pytest.raises(ValueError, match="did you mean"):
        compare_gpus(_record().plan(), ["A100-41GB"])
    file = tmp_path / "prices.csv"
    file.write_text("GPU,price\nL4-24GB,0.71\n# spot\n\nA100-40GB , 3.67\n")
    assert read_prices(file) == {"L4-24GB": 0.71, "A100-40GB": 3.67}
    for line in ("L4-24GB", "L4-24GB,-1", "L4-24GB,nan", "L4-24GB,inf", "L4-25GB,1"):
        file.write_text(f"GPU,price\n{line}\n")
        with pytest.raises(ValueError, match="line 2"):
            read_prices(file)
    file.write_text("L4-25GB,1\n")  # not a header
    with pytest.raises(ValueError, match="line 1: Unknown device"):
        read_prices(file)
    file.write_text("L4-24GB,0.71 USD\n")
    with pytest.raises(ValueError, match="line 1: expected a GPU and its price"):
        read_prices(file)
    for nothing in ("", "GPU,price\n", '{"L4-24GB": 0.71}\n', "L4-24GB;0.71\n"):
        file.write_text(nothing)
        with pytest.raises(ValueError, match="has no prices: expected lines with"):
            read_prices(file)


def test_explain_says_what_limits_the_step():
    text = _record().plan().explain()
    assert re.search(r"Projected time on A100-40GB: \S+ m?s \(\S+ m?s to \S+ m?s\)", text)
    assert "What limits this step: " in text
    assert "Slowest lines" in text
    assert "scores = " in text


def test_changes_are_projected_and_only_those_that_help_are_named():
    graph = _record(named=True)
    plan = graph.plan()
    found = {
        str(each).partition(":")[0]: each.seconds
        for each in changes(plan.time, graph.nodes, PROFILES["A100-40GB"])
    }
    assert found["forward and backward pass in bfloat16"] < plan.seconds / 2
    assert "attention with F.scaled_dot_product_attention, at best" in found
    assert all(seconds < plan.seconds for seconds in found.values())
    assert "on A100-40GB" not in found


def test_more_samples_cost_a_waiting_gpu_nothing():
    x = torch.randn(4, 16)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(20)))
    with lazyviz.lazy(device="H100-80GB", batch=[x]) as graph:
        model.cuda()(x.cuda())
    plan = graph.plan()
    twice = plan._answers.sized(graph.nodes, 2 * plan.batch_size)
    found = {
        str(each).partition(":")[0]: each.seconds
        for each in changes(plan.time, graph.nodes, PROFILES["H100-80GB"], twice)
    }
    assert found["twice the batch size, per half"] == pytest.approx(plan.seconds / 2, rel=0.05)
    assert "waits for Python" in plan.explain()
