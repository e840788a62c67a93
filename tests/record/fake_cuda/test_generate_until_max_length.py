"""Text generation on an absent GPU: up to the maximum length, with the KV cache as a category."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazyviz

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")

LAYERS, HEADS, HEAD_DIM, BATCH, PROMPT = 2, 2, 16, 3, 7


def llama(**options):
    config = transformers.LlamaConfig(
        hidden_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=HEADS,
        intermediate_size=128,
        vocab_size=256,
        eos_token_id=5,
        pad_token_id=0,
        **options,
    )
    return transformers.LlamaForCausalLM(config).eval()


def cache_nbytes(length, itemsize=4):
    return 2 * LAYERS * HEADS * HEAD_DIM * length * BATCH * itemsize


@pytest.mark.parametrize("assume", [None, "until max_new_tokens"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True},
        {"min_new_tokens": 3},
        {"num_beams": 3},
        {"num_beams": 2, "do_sample": True, "early_stopping": True},
        {"num_beams": 3, "num_return_sequences": 1, "length_penalty": 0.5, "use_cache": False},
    ],
    ids=str,
)
def test_generate_goes_on_to_its_longest_length(options, assume):
    with lazyviz.lazy(device="RTX-4090", assume=assume) as graph:
        model = llama().cuda()
        prompt = torch.randint(0, 256, (BATCH, PROMPT), device="cuda")
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=9, **options)
        assert found.shape == (BATCH, PROMPT + 9)
    assert not graph.sync_points
    assert "Assumed: generate() stops only at the maximum length" in graph.plan().explain()


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")  # static caches: torch.compile
@pytest.mark.parametrize("options", [{}, {"cache_implementation": "static"}, {"use_cache": False}], ids=str)
def test_a_prompt_without_a_mask_is_assumed_to_have_no_padding(options):
    with lazyviz.lazy(device="RTX-4090") as graph:
        model = llama().cuda()
        prompt = torch.randint(0, 256, (BATCH, PROMPT), device="cuda")
        assert model.generate(prompt, max_new_tokens=4, **options).shape == (BATCH, PROMPT + 4)
    assert not graph.sync_points
    assert "the prompt of generate() has no padding" in graph.plan().explain()


def test_values_for_each_read_end_generation_where_they_say():
    with lazyviz.lazy(device="RTX-4090", assume={"*": iter([False, False, True])}):
        model = llama().cuda()
        prompt = torch.tensor([[1, 2, 3]], device="cuda")
        found = model.generate(prompt, max_new_tokens=9)
        assert found.shape == (1, 6)


def test_positions_of_the_user_s_own_that_may_restart_are_not_assumed():
    with lazyviz.lazy(device="RTX-4090") as graph, pytest.raises(lazyviz.AbsentDeviceError):
        model = llama().cuda()
        words = torch.randint(0, 256, (BATCH, PROMPT), device="cuda")
        model(words, position_ids=torch.randint(0, 9, words.shape, device="cuda"), use_cache=False)
    assert "no padding" not in graph.plan().explain()


@pytest.mark.parametrize("values", [[7, 7, 3], iter([7, 7, 3])], ids=["list", "iterator"])
def test_a_list_has_a_value_for_each_read_of_one_number(values):
    read = []
    with lazyviz.lazy(device="RTX-4090", assume={"*": values}):
        for _ in range(9):
            read.append(torch.randint(0, 9, (), device="cuda").item())
            if read[-1] == 3:
                break
        with pytest.raises(lazyviz.AbsentDeviceError, match="read more often"):
            torch.randint(0, 9, (), device="cuda").item()
    assert read == [7, 7, 3]


def test_a_list_ends_generation_where_it_says():
    with lazyviz.lazy(device="RTX-4090", assume={"*": [False, False, True]}):
        found = llama().cuda().generate(torch.tensor([[1, 2, 3]], device="cuda"), max_new_tokens=9)
        assert found.shape == (1, 6)


def test_other_text_is_no_assumption():
    with pytest.raises(ValueError, match="until max_new_tokens"), lazyviz.lazy(assume="until it ends"):
        pass


def test_constants_shaped_like_unknown_tensors_are_known():
    with lazyviz.lazy(device="RTX-4090") as graph:
        drawn = torch.randn(4, 5, device="cuda")
        assert torch.ones_like(drawn).all()
        assert not drawn.new_zeros(3).any()
        assert int(torch.full_like(drawn, 2).sum()) == 40
        with pytest.raises(lazyviz.AbsentDeviceError):
            bool(drawn.any())
    assert not graph.sync_points


def test_the_kv_cache_is_what_the_formula_says():
    with lazyviz.lazy(device="RTX-4090") as graph:
        model = llama().cuda()
        words = torch.randint(0, 256, (BATCH, PROMPT), device="cuda")
        with torch.no_grad():
            found = model(words, use_cache=True)
            at_first = len(graph.nodes) - 1
            for _ in range(4):
                found = model(words[:, :1], past_key_values=found.past_key_values, use_cache=True)
    plan = graph.plan()
    assert plan.at(at_first).by_category["kv_cache"] == cache_nbytes(PROMPT)
    assert plan.at(len(graph.nodes) - 1).by_category["kv_cache"] == cache_nbytes(PROMPT + 4)
    for text in (plan.explain(), plan.table().text()):
        assert "KV cache" in text and "kv_cache" not in text


def test_a_cache_from_before_the_block_is_one():
    model = llama()
    words = torch.randint(0, 256, (BATCH, PROMPT))
    with torch.no_grad():
        before = model(words, use_cache=True).past_key_values
        with lazyviz.lazy() as graph:
            after = model(words[:, :1], past_key_values=before, use_cache=True)
    last = graph.plan(device="cpu").at(len(graph.nodes) - 1).by_category
    assert last["kv_cache"] == cache_nbytes(PROMPT + 1)
    assert after.logits.shape == (BATCH, 1, 256)


class KVCache(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("k_cache", torch.zeros(2, 8, 4))

    def forward(self, key):
        self.k_cache[:, :1] = key
        return self.k_cache.sum()


def test_other_caches():
    cache = KVCache()
    with lazyviz.lazy() as graph:
        total = cache(torch.ones(2, 1, 4))
        keys = [torch.zeros(3, 5) for _ in range(2)]
        lazyviz.mark_kv_cache(keys, {"values": torch.zeros(7)})
    assert graph.plan().at(len(graph.nodes) - 1).by_category["kv_cache"] >= (2 * 8 * 4 + 2 * 15) * 4
    with pytest.raises(TypeError, match="a KV cache must be tensors"):
        lazyviz.mark_kv_cache("keys")
    assert float(total) == 8


def test_objects_that_refer_to_each_other_are_looked_through_once():
    class Cache:
        pass

    cache, owner = Cache(), Cache()
    cache.owner, owner.cache, cache.keys = owner, cache, torch.zeros(16)
    with lazyviz.lazy() as without:
        torch.zeros(16) + 1
    with lazyviz.lazy() as graph:
        cache.keys + 1
        lazyviz.mark_kv_cache(cache)
    assert graph.plan().by_category["kv_cache"] == cache.keys.nbytes
    compared = lazyviz.compare(without, graph)
    for text in (graph.plan().explain(), graph.plan().table().text(), compared.table().text()):
        assert "KV cache" in text and "kv_cache" not in text
    with pytest.raises(TypeError, match="holds none"):
        lazyviz.mark_kv_cache(Cache())


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_the_count_of_tokens_of_a_static_cache_is_no_part_of_it():
    transformers = pytest.importorskip("transformers")
    layers, heads, width, tokens = 2, 2, 16, 16
    config = transformers.LlamaConfig(
        vocab_size=100,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=heads,
        max_position_embeddings=128,
    )
    with lazyviz.lazy(device="A100-40GB") as graph:
        model = transformers.LlamaForCausalLM(config).cuda().eval()
        model.generate(
            torch.zeros(1, tokens // 2, dtype=torch.long, device="cuda"),
            max_new_tokens=tokens // 2,
            min_new_tokens=tokens // 2,
            do_sample=False,
            cache_implementation="static",
            pad_token_id=0,
        )
    # The last token is not put into the cache.
    formula = 2 * layers * heads * width * (tokens - 1) * 4
    assert max(graph.plan().category_timeline["kv_cache"]) == formula
