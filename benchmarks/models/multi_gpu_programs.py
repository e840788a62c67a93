"""Training programs for several devices, as run by one rank; each builds everything it needs.

They are written as for ``torchrun``: ``torch.distributed`` is initialized, and the device is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel


@dataclass(frozen=True)
class Program:
    """``run(device, ranks)`` trains for two steps; ``ranks`` are the numbers of ranks for measurements."""

    run: Callable[[torch.device, int], Any]
    ranks: tuple[int, ...] = (2, 4)


def gpt2(device: torch.device, **changes: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {
        "n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": 500, "n_positions": 64,
        "bos_token_id": 1, "eos_token_id": 1,
    } | changes  # fmt: skip
    model: nn.Module = GPT2LMHeadModel(GPT2Config(**sizes))
    return model.to(device)


def llama(device: torch.device, **changes: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "num_hidden_layers": 3, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 64,
    } | changes  # fmt: skip
    with torch.device(device):
        return LlamaForCausalLM(LlamaConfig(**sizes))


def tokens(device: torch.device, vocabulary: int = 500, batch: int = 4, length: int = 32) -> torch.Tensor:
    return torch.randint(0, vocabulary, (batch, length), device=device)


def train(model: nn.Module, ids: torch.Tensor, steps: int = 2) -> Any:
    """Two steps of a causal language model with AdamW."""
    optimizer = torch.optim.AdamW(model.parameters())
    loss = None
    for _ in range(steps):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss, model, optimizer


def ddp(**options: Any) -> Callable[[torch.device, int], Any]:
    def run(device: torch.device, ranks: int) -> Any:
        model = DistributedDataParallel(gpt2(device), **options)
        return train(model, tokens(device))

    return run


def ddp_accumulating(device: torch.device, ranks: int) -> Any:
    model = DistributedDataParallel(gpt2(device))
    optimizer = torch.optim.AdamW(model.parameters())
    ids = tokens(device)
    for _ in range(2):
        with model.no_sync():
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def ddp_without_state(device: torch.device, ranks: int) -> Any:
    """The peak is in the second backward pass, after the buckets have been rebuilt."""
    model = DistributedDataParallel(gpt2(device), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = tokens(device)
    for _ in range(3):
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def ddp_convolutions(device: torch.device, ranks: int) -> Any:
    """Strided convolutions, and batch normalization, whose buffers are broadcast."""
    layers: list[nn.Module] = []
    for channels, to, stride in ((3, 24, 2), (24, 48, 2), (48, 64, 1)):
        convolution = nn.Conv2d(channels, to, 3, stride, padding=1)
        layers += [convolution, nn.BatchNorm2d(to), nn.ReLU(inplace=True)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)]
    model = DistributedDataParallel(nn.Sequential(*layers).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images, classes = (
        torch.randn(8, 3, 48, 48, device=device),
        torch.zeros(8, dtype=torch.long, device=device),
    )
    for _ in range(2):
        nn.functional.cross_entropy(model(images), classes).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """FSDP2 by layer, as torchtitan does."""
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]  # gloo has no average
    return model


def fsdp(**options: Any) -> Callable[[torch.device, int], Any]:
    def run(device: torch.device, ranks: int) -> Any:
        mesh = init_device_mesh(device.type, (ranks,))
        return train(shard(llama(device), mesh=mesh, **options), tokens(device))

    return run


class FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self, width: int = 64, layers: int = 3, vocabulary: int = 512) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([FeedForward(width) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _steps(model: nn.Module, ids: torch.Tensor) -> Any:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def tensor_parallel(device: torch.device, ranks: int) -> Any:
    mesh = init_device_mesh(device.type, (ranks,))
    with torch.device(device):
        model = Stack()
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "layers.*.up": ColwiseParallel(),
            "layers.*.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        },
    )
    return _steps(model, tokens(device))


def sequence_parallel(device: torch.device, ranks: int) -> Any:
    mesh = init_device_mesh(device.type, (ranks,))
    with torch.device(device):
        model = Stack()
    _plan_sequences(model, mesh)
    ids = tokens(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        with loss_parallel():
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _plan_sequences(model: nn.Module, mesh: Any) -> None:
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "layers.*.norm": SequenceParallel(),
            "layers.*.up": ColwiseParallel(input_layouts=Shard(1)),
            "layers.*.down": RowwiseParallel(output_layouts=Shard(1)),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        },
    )


def two_dimensions(device: torch.device, ranks: int) -> Any:
    """FSDP2 over half of the ranks, tensor parallelism over pairs."""
    mesh = init_device_mesh(device.type, (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    with torch.device(device):
        model = Stack()
    parallelize_module(
        model,
        mesh["tp"],
        {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()},
    )
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    model.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    return _steps(model, tokens(device))


def pipeline(name: str, stages: int = 1) -> Callable[[torch.device, int], Any]:
    """A schedule of ``torch.distributed.pipelining`` by name, with ``stages`` stages on each rank."""

    def run(device: torch.device, ranks: int) -> Any:
        from torch.distributed.pipelining import PipelineStage, schedules

        rank, count = torch.distributed.get_rank(), ranks * stages
        indices = range(rank, count, ranks)
        sent = torch.empty(4, 16, 64, device="meta", requires_grad=True)  # a micro-batch between stages
        with torch.device(device):
            blocks = [nn.Sequential(FeedForward(64), FeedForward(64)) for _ in indices]
        here = [
            PipelineStage(
                block, index, count, device, input_args=sent if index else sent.detach(), output_args=sent
            )
            for block, index in zip(blocks, indices)
        ]
        schedule = getattr(schedules, name)(
            here if stages > 1 else here[0], n_microbatches=8, loss_fn=nn.functional.mse_loss
        )
        optimizer = torch.optim.AdamW([each for block in blocks for each in block.parameters()])
        for _ in range(2):
            batch = torch.randn(32, 16, 64, device=device)
            last = {"target": torch.zeros_like(batch), "losses": []} if indices[-1] == count - 1 else {}
            schedule.step(*([] if rank else [batch]), **last)
            optimizer.step()
            optimizer.zero_grad()
        return blocks, optimizer

    return run


def distributed_module(device: torch.device, ranks: int) -> Any:
    """Parameters and inputs of rank 0, scattered to all ranks as DTensors."""
    mesh = init_device_mesh(device.type, (ranks,))

    def part(name: str, module: nn.Module, mesh: Any) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))

    with torch.device(device):
        model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        batch = torch.randn(16, 64)
    distribute_module(model, mesh, part)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(distribute_tensor(batch, mesh, [Replicate()])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def product(left: Any, right: Any, *sizes: int) -> Callable[[torch.device, int], Any]:
    """A product of two DTensors with these placements, gathered on every rank."""

    def run(device: torch.device, ranks: int) -> Any:
        mesh = init_device_mesh(device.type, sizes or (ranks,))
        factors = [
            distribute_tensor(torch.randn(256, 256, device=device), mesh, placements)
            for placements in (left, right)
        ]
        result: Any = factors[0] @ factors[1]
        return result.full_tensor()

    return run


_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

PROGRAMS: dict[str, Program] = {
    "DDP GPT-2": Program(ddp()),
    "DDP GPT-2, gradients as views": Program(ddp(gradient_as_bucket_view=True)),
    "DDP GPT-2, small buckets": Program(ddp(bucket_cap_mb=0.05)),
    "DDP GPT-2, no_sync": Program(ddp_accumulating),
    "DDP GPT-2, static graph, SGD": Program(ddp_without_state),
    "DDP of convolutions": Program(ddp_convolutions),
    "FSDP2 Llama": Program(fsdp()),
    "FSDP2 Llama, kept after forward": Program(fsdp(reshard_after_forward=False)),
    "FSDP2 Llama, bfloat16": Program(fsdp(mp_policy=_BF16)),
    "tensor parallel": Program(tensor_parallel),
    "sequence and loss parallel": Program(sequence_parallel),
    "FSDP2 and tensor parallel": Program(two_dimensions, (4,)),
    "distribute_module": Program(distributed_module),
    "product of rows and columns": Program(product([Shard(0)], [Shard(1)])),
    "product of columns and rows": Program(product([Shard(1)], [Shard(0)])),
    "product on a 2-D mesh": Program(product([Shard(0), Shard(1)], [Shard(0), Shard(1)], 2, 2), (4,)),
    "pipeline, GPipe": Program(pipeline("ScheduleGPipe")),
    "pipeline, 1F1B": Program(pipeline("Schedule1F1B")),
    "pipeline, interleaved 1F1B": Program(pipeline("ScheduleInterleaved1F1B", 2)),
    "pipeline, zero bubble": Program(pipeline("ScheduleInterleavedZeroBubble", 2)),
}
