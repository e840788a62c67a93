"""The work of ops: FLOPs as PyTorch's counter says, bytes by what is touched, and sums."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import lazyviz
from lazyviz.plan.runtime import bytes_and_launches
from lazyviz.plan.runtime.bytes_and_launches import Work, operator_class, work_key, work_of
from lazyviz.plan.runtime.gpu_kernel_times import Product, products_of
from lazyviz.plan.runtime.time_at_lower_precision import in_dtype


def _language_model(kind, **config):
    def build():
        settings = getattr(transformers, f"{kind}Config")(**config)
        model = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(kind, f"{kind}ForCausalLM"))(settings)
        ids = torch.randint(0, 90, (2, 12))
        return lambda: model(input_ids=ids, labels=ids).loss

    return build


def _encoder(kind, head="Model", **config):
    def build():
        model = getattr(transformers, kind + head)(getattr(transformers, f"{kind}Config")(**config))
        ids = torch.randint(0, 90, (2, 12))
        return lambda: model(input_ids=ids)[0].sum()

    return build


def _net(make, *shapes):
    def build():
        model, inputs = make(), [torch.randn(*shape) for shape in shapes]

        def call():
            out = model(*inputs)
            return (out[0] if isinstance(out, tuple) else out).sum()

        return call

    return build


def _function(f, *shapes):
    def build():
        inputs = [torch.randn(*shape, requires_grad=True) for shape in shapes]
        return lambda: f(*inputs).sum()

    return build


def _bottleneck(width, stride=1, groups=1):
    return nn.Sequential(
        nn.Conv2d(width, 8, 1), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride, 1, groups=groups), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5),
    )  # fmt: skip


SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
VOCABULARY = {"vocab_size": 100}
GPT = {"n_layer": 2, "n_embd": 32, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2, **VOCABULARY}
LLAMA = {**SMALL, **VOCABULARY, "num_key_value_heads": 2}
T, H = (2, 4, 12, 8), (2, 12, 32)

MODELS = {
    "gpt2": _language_model("GPT2", **GPT),
    "gpt2 eager": _language_model("GPT2", attn_implementation="eager", **GPT),
    "llama": _language_model("Llama", **LLAMA),
    "llama eager": _language_model("Llama", attn_implementation="eager", **LLAMA),
    "mistral": _language_model("Mistral", **LLAMA),
    "qwen2": _language_model("Qwen2", **LLAMA),
    "opt": _language_model(
        "OPT", ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=64,
        **{k: v for k, v in (SMALL | VOCABULARY).items() if k != "intermediate_size"},
    ),
    "gpt neox": _language_model("GPTNeoX", **SMALL, **VOCABULARY),
    "bert": _encoder("Bert", **SMALL, **VOCABULARY),
    "bert eager": _encoder("Bert", attn_implementation="eager", **SMALL, **VOCABULARY),
    "bert classifier": _encoder("Bert", "ForSequenceClassification", **SMALL, **VOCABULARY),
    "roberta": _encoder("Roberta", **SMALL, **VOCABULARY),
    "electra": _encoder("Electra", embedding_size=16, **SMALL, **VOCABULARY),
    "mlp": _net(lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), (5, 8)),
    "mlp without biases": _net(
        lambda: nn.Sequential(nn.Linear(8, 16, False), nn.ReLU(), nn.Linear(16, 4, False)), (5, 8)
    ),
    "linear in 3 dimensions": _net(lambda: nn.Linear(32, 16), H),
    "conv": _net(lambda: nn.Conv2d(3, 8, 3, padding=1), (2, 3, 16, 16)),
    "conv without bias": _net(lambda: nn.Conv2d(3, 8, 5, stride=2, bias=False), (2, 3, 16, 16)),
    "conv dilated": _net(lambda: nn.Conv2d(3, 8, 3, dilation=2), (2, 3, 16, 16)),
    "conv in groups": _net(lambda: nn.Conv2d(4, 8, 3, groups=2), (2, 4, 16, 16)),
    "conv depthwise": _net(
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Conv2d(4, 8, 1)), (2, 4, 9, 9)
    ),
    "conv 1d": _net(lambda: nn.Conv1d(3, 8, 3), (2, 3, 16)),
    "conv 3d": _net(lambda: nn.Conv3d(2, 4, 3), (2, 2, 6, 6, 6)),
    "conv transposed": _net(lambda: nn.ConvTranspose2d(3, 8, 3, stride=2), (2, 3, 8, 8)),
    "bottleneck": _net(lambda: _bottleneck(6), (2, 6, 12, 12)),
    "bottleneck, strided": _net(lambda: _bottleneck(6, 2), (2, 6, 12, 12)),
    "bottleneck, groups": _net(lambda: _bottleneck(6, 1, 4), (2, 6, 12, 12)),
    "unet": _net(
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.GroupNorm(2, 8), nn.SiLU(),
            nn.Upsample(scale_factor=2), nn.Conv2d(8, 3, 3),
        ),
        (2, 3, 16, 16),
    ),
    "encoder layer": _net(lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), H),
    "encoder, dropout off": _net(lambda: nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True), H),
    "decoder layer": _net(lambda: nn.TransformerDecoderLayer(32, 4, 64, batch_first=True), H, H),
    "transformer": _net(lambda: nn.Transformer(32, 4, 1, 1, 64, batch_first=True), H, H),
    "multihead attention": _net(lambda: nn.MultiheadAttention(32, 4, batch_first=True), H, H, H),
    "rnn cell": _net(lambda: nn.RNNCell(8, 16), (3, 8)),
    "gru cell": _net(lambda: nn.GRUCell(8, 16), (3, 8)),
    "lstm cell": _net(lambda: nn.LSTMCell(8, 16), (3, 8)),
    "matmul broadcast": _function(torch.matmul, (2, 3, 4, 5), (5, 6)),
    "matmul batched": _function(torch.matmul, (2, 3, 4, 5), (2, 3, 5, 6)),
    "einsum": _function(lambda a, b: torch.einsum("bhqd,bhkd->bhqk", a, b), T, T),
    "baddbmm": _function(lambda a, b, c: torch.baddbmm(a, b, c), (2, 3, 5), (2, 3, 4), (2, 4, 5)),
    "attention by hand": _function(lambda q, k, v: (q @ k.transpose(-1, -2)).softmax(-1) @ v, T, T, T),
    "addmm": _function(torch.addmm, (3, 5), (3, 4), (4, 5)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODELS)
def test_flops_are_those_of_pytorchs_counter(name):
    torch.manual_seed(0)
    step = MODELS[name]()
    with FlopCounterMode(display=False) as counter:
        step().backward()
    with lazyviz.lazy() as graph:
        step().backward()
    counted = counter.get_flop_counts()["Global"]
    ours: dict[object, int] = {}
    for node in graph.nodes:
        ours[node.op.overloadpacket] = ours.get(node.op.overloadpacket, 0) + work_of(node).flops
    assert {packet: ours.get(packet, 0) for packet in counted} == counted
    beyond = {str(packet) for packet, flops in ours.items() if flops and packet not in counted}
    assert beyond <= {
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_flash_attention_for_cpu_backward",
    }


def test_attention_on_the_cpu_counts_as_its_cuda_kernels_do():
    q = torch.randn(2, 4, 12, 8, requires_grad=True)
    with lazyviz.lazy() as graph:
        F.scaled_dot_product_attention(q, q, q).sum().backward()
    product = 2 * 2 * 4 * 12 * 12 * 8
    by_phase = bytes_and_launches.grouped(graph.nodes, lambda node: node.phase)
    assert by_phase["forward"].flops == 2 * product
    assert by_phase["backward"].flops == 5 * product  # scores again, and two gradients of either product


def _works(step):
    with lazyviz.lazy() as graph:
        step()
    return {node.name.rpartition("_")[0]: work_of(node) for node in graph.nodes}


def test_bytes_are_what_a_kernel_touches_once():
    a, row = torch.randn(8, 16), torch.randn(16)
    table, rows = torch.randn(1000, 4), torch.tensor([1, 2, 3])

    def step():
        torch.exp(a)
        a + row.expand(8, 16)
        a.t().view_as(a.t())
        torch.empty(100)
        F.embedding(rows, table)
        torch.zeros(10).copy_(row[:10])

    found = _works(step)
    assert found["exp"] == Work(0, 512, 512, 1)
    assert found["add"] == Work(0, 512 + 64, 512, 1)
    assert found["view"] == found["t"] == found["empty"] == Work()
    assert found["embedding"] == Work(0, 48 + 24, 48, 1)
    assert found["copy_"] == Work(0, 40, 40, 1)


def test_an_op_in_place_reads_and_writes_its_argument():
    a, b = torch.randn(8), torch.randn(8)

    def step():
        a.mul_(b)
        b.zero_()

    found = _works(step)
    assert found["mul_"] == Work(0, 64, 32, 1)
    assert found["zero_"] == Work(0, 0, 32, 1)


def test_optimizer_kernels_take_many_tensors_each():
    parameters = [torch.randn(4, requires_grad=True) for _ in range(250)]
    for each in parameters:
        each.grad = torch.ones(4)
    optimizer = torch.optim.SGD(parameters, lr=0.1, foreach=True)
    with lazyviz.lazy() as graph:
        optimizer.step()
    (node,) = (node for node in graph.nodes if operator_class(node) == "optimizer")
    assert work_of(node) == Work(0, 250 * 32, 250 * 16, 5)


def test_sums_and_intensity():
    together = Work(10, 4, 1, 1) + Work(5, 0, 0, 2)
    assert together == Work(15, 4, 1, 3)
    assert together.intensity == 3
    assert Work(5).intensity is None


def test_a_node_has_its_flops_and_bytes():
    x, w = torch.ones(4, 8), torch.ones(8, 16)
    with lazyviz.lazy() as graph:
        (x @ w).t()
    product, view = graph.nodes
    assert product.flops == 2 * 4 * 8 * 16
    assert product.bytes_moved == 4 * (4 * 8 + 8 * 16 + 4 * 16)
    assert (view.flops, view.bytes_moved) == (0, 0)


def test_ops_of_the_same_work_are_looked_up_by_one_object():
    with lazyviz.lazy() as graph:
        x = torch.ones(8, 8)
        y, z = x + 1, x + 1
        other = x[:4] + 1
    first, second, smaller = [node for node in graph.nodes if node.op == torch.ops.aten.add.Tensor]
    assert work_key(first) is work_key(second) is first.work_key
    assert work_key(smaller) is not work_key(first)
    assert work_of(first) == work_of(second) != work_of(smaller)
    halves = in_dtype(graph.nodes, torch.bfloat16)
    added = [node for node in halves if node.op == first.op]
    assert added[0].work_key is added[1].work_key is not first.work_key
    assert work_of(added[0]).bytes_moved * 2 == work_of(first).bytes_moved
    del y, z, other


@pytest.mark.parametrize(("f", "shapes", "flops"), [
    (lambda a, b, c: torch.addbmm(a, b, c), [(3, 6), (4, 3, 5), (4, 5, 6)], 2 * 4 * 3 * 5 * 6),
    (lambda a, b, c: F.bilinear(a, b, c), [(3, 5), (3, 6), (7, 5, 6)], 2 * 3 * 5 * 6 * 7),
    (lambda x, w, b: F.conv_tbc(x, w, b, 1), [(7, 2, 4), (3, 4, 6), (6,)], 2 * 7 * 2 * 3 * 4 * 6),
    (lambda a, b: torch.cdist(a, b), [(40, 5), (50, 5)], 2 * 40 * 50 * 7),
    (lambda x: nn.LSTM(8, 16, 2, bidirectional=True)(x)[0], [(7, 3, 8)], 84 * 64 * (8 + 16 + 32 + 16)),
    (lambda x: nn.LSTM(1, 16)(x)[0], [(7, 3, 1)], 2 * 21 * 64 * (1 + 16)),
])  # fmt: skip
def test_products_that_the_counter_does_not_know(f, shapes, flops):
    with lazyviz.lazy() as graph:
        f(*(torch.randn(*shape) for shape in shapes))
    assert sum(node.flops for node in graph.nodes) == flops


def test_a_recurrent_layer_on_a_gpu_takes_as_many_flops_as_on_the_cpu():
    def flops(**options):
        with lazyviz.lazy(**options) as graph, torch.device("cuda" if options else "cpu"):
            x = torch.randn(7, 3, 8, requires_grad=True)
            nn.LSTM(8, 16, 2, bidirectional=True)(x)[0].sum().backward()
        return sum(node.flops for node in graph.nodes)

    assert flops(device="A100-40GB") == flops() == 3 * 2 * 21 * 2 * 64 * (8 + 16 + 32 + 16)


def test_products_in_groups_have_the_flops_of_their_rows():
    with lazyviz.lazy(device="H100-80GB") as graph:
        rows = torch.ones(64, 32, device="cuda", dtype=torch.bfloat16)
        weights = torch.ones(4, 32, 16, device="cuda", dtype=torch.bfloat16)
        ends = torch.tensor([16, 32, 48, 64], device="cuda", dtype=torch.int32)
        torch._grouped_mm(rows, weights, offs=ends)
    product = next(node for node in graph.nodes if "_grouped_mm" in str(node.op))
    assert product.flops == 2 * 64 * 32 * 16
    assert products_of(product, "batched matmul") == [Product(4, 16, 16, 32)]
    assert graph.plan().seconds > 0


@pytest.mark.parametrize("length", [5, 9])
def test_fused_attention_modules_do_the_products_of_the_others(length):
    """PyTorch's counter has no formula for the op that ``nn.MultiheadAttention`` calls for inference."""
    attention = nn.MultiheadAttention(32, 4, batch_first=True).eval()
    x = torch.randn(2, length, 32)
    with FlopCounterMode(display=False) as counter:
        attention(x, x, x)
    with lazyviz.lazy() as graph, torch.no_grad():
        attention(x, x, x)
    assert [node.op.name() for node in graph.nodes] == ["aten::_native_multi_head_attention"]
    plan = graph.plan(device="A100-40GB")
    assert plan.flops == counter.get_total_flops() and plan.time.mfu > 0


def _moved(f, *shapes):
    """The bytes that the last op with a kernel reads and writes, by its name."""
    with lazyviz.lazy() as graph:
        given = [torch.randn(*shape, requires_grad=len(shape) > 1) for shape in shapes]
        f(*given)
    work = work_of([node for node in graph.nodes if work_of(node).launches][-1])
    return work.bytes_read, work.bytes_written


SIZE = 4 * 64 * 64


@pytest.mark.parametrize("f", [
    torch.zeros_like, torch.rand_like, lambda x: torch.full_like(x, 2.0), lambda x: x.new_zeros(64, 64),
    lambda x: x.detach().exponential_(), lambda x: x.detach().log_normal_(),
])  # fmt: skip
def test_nothing_is_read_of_a_tensor_that_gives_its_shape_or_is_overwritten(f):
    assert _moved(f, (64, 64)) == (0, SIZE)


@pytest.mark.parametrize(("f", "read"), [
    (lambda x: F.avg_pool2d(x, 2).backward(torch.ones(1, 32, 32)), SIZE // 4),
    (lambda x: F.max_pool2d(x, 2).backward(torch.ones(1, 32, 32)), SIZE // 4 * 3),
    (lambda x: F.pad(x, (1, 1, 1, 1), "reflect").backward(torch.ones(1, 66, 66)), 4 * 66 * 66),
    (lambda x: F.adaptive_avg_pool2d(x, 32).backward(torch.ones(1, 32, 32)), SIZE // 4),
])  # fmt: skip
def test_backward_of_pooling_and_padding_reads_no_input_of_the_forward_pass(f, read):
    assert _moved(f, (1, 64, 64)) == (read, SIZE)


def test_a_loss_reads_one_class_of_each_row_and_its_backward_pass_none():
    classes = torch.zeros(64, dtype=torch.long)
    assert _moved(lambda x: F.nll_loss(x, classes), (64, 64)) == (4 * 64 + 8 * 64, 8)
    read, written = _moved(lambda x: F.nll_loss(x, classes).backward(), (64, 64))
    assert written == SIZE and read < SIZE // 4


def test_a_scatter_writes_an_element_per_index():
    index = torch.zeros(64, 2, dtype=torch.long)
    found = _moved(lambda x, y: x.detach().scatter_(1, index, y.detach()), (64, 64), (64, 2))
    assert found == (64 * 2 * (8 + 4 + 4), 64 * 2 * 4)
