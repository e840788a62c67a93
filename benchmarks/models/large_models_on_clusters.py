"""Training steps of large models on absent GPUs, as run by one rank; no weights are loaded.

python benchmarks/models/large_models_on_clusters.py [llama-70b|mixtral|llama-8b-2d|gpt2-ddp ...]
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lazyviz

RESULTS = Path(__file__).parent.parent / "results" / "large_models_on_clusters.json"


def _train(model: nn.Module, ids: torch.Tensor, vocabulary: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    logits = model(input_ids=ids, use_cache=False).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def llama_70b() -> None:
    """Llama 3 70B: FSDP2 by layer in bfloat16, activation checkpointing."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = model.model.layers
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer)
        fully_shard(layers[index], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda")
    ids = torch.randint(0, config.vocab_size, (1, 4096), device="cuda")
    _train(model, ids, config.vocab_size)


def mixtral() -> None:
    """Mixtral 8x7B: the weights of the experts, and all others, sharded by FSDP2."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, num_local_experts=8, vocab_size=32000,
    )  # fmt: skip
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer.mlp.experts, mp_policy=policy)
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cuda")
    ids = torch.randint(0, config.vocab_size, (1, 2048), device="cuda")
    _train(model, ids, config.vocab_size)


def llama_8b_2d() -> None:
    """Llama 3 8B: tensor parallel over 2 ranks, FSDP2 over the 4 pairs."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from transformers import LlamaConfig, LlamaForCausalLM

    mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "tp"))
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    plan = {
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(),
    }
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        parallelize_module(layer, mesh["tp"], plan)
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy)
    model.to_empty(device="cuda")
    ids = torch.randint(0, config.vocab_size, (1, 4096), device="cuda")
    _train(model, ids, config.vocab_size)


def gpt2_ddp() -> None:
    """GPT-2 (124M), DistributedDataParallel under autocast."""
    from torch.nn.parallel import DistributedDataParallel
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config()
    with torch.device("cuda"):
        model = DistributedDataParallel(GPT2LMHeadModel(config), gradient_as_bucket_view=True)
    ids = torch.randint(0, config.vocab_size, (16, 1024), device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        _train(model, ids, config.vocab_size)


PROGRAMS: dict[str, Callable[[], None]] = {
    "llama-70b": llama_70b,
    "mixtral": mixtral,
    "llama-8b-2d": llama_8b_2d,
    "gpt2-ddp": gpt2_ddp,
}


def planned(name: str, ranks: int = 8) -> dict[str, Any]:
    """The plan of one rank, and the time for recording and planning."""
    start, own = time.perf_counter(), time.process_time()
    with lazyviz.lazy(device="H100-80GB", mesh=(ranks,)) as graph:
        PROGRAMS[name]()
    recorded, own = time.perf_counter() - start, time.process_time() - own
    plan = graph.plan()
    seconds = time.perf_counter() - start - recorded
    result = {
        "program": name,
        "ops": len(graph.nodes),
        "recorded_seconds": round(recorded, 1),
        "recorded_cpu_seconds": round(own, 1),
        "planned_seconds": round(seconds, 1),
        "eager_peak_bytes": plan.eager_peak_bytes,
        "eager_reserved_bytes": plan.eager_reserved_bytes,
        "communication_bytes": plan.communication_bytes,
        "fits": plan.fits,
        "by_category": {key: value for key, value in plan.by_category.items() if value},
    }
    lazyviz.reset()
    gc.collect()
    return result


def main() -> None:
    names = sys.argv[1:] or list(PROGRAMS)
    rows = []
    for name in names:
        rows.append(planned(name))
        print(json.dumps(rows[-1]), flush=True)
    if len(names) == len(PROGRAMS):
        RESULTS.write_text(json.dumps({"torch": torch.__version__, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
