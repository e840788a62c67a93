"""The planned peak of each rank, compared with real processes connected by gloo, on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ..warm_python import environment, python

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[2]
SECONDS = 400  # of a machine that has much else to do
IMPORTS = (
    "torch",
    "lazyviz",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
)


@pytest.mark.parametrize(
    ("program", "ranks"),
    [
        ("DDP GPT-2, gradients as views", 2),
        ("DDP GPT-2, static graph, SGD", 2),
        ("DDP of convolutions", 2),
        ("FSDP2 Llama, bfloat16", 2),
        ("tensor parallel", 2),
        ("FSDP2 and tensor parallel", 4),
        ("pipeline, interleaved 1F1B", 2),
        ("distribute_module", 2),
        ("product of rows and columns", 2),
        ("product on a 2-D mesh", 4),
    ],
)
@pytest.mark.slow
def test_each_rank_takes_what_was_planned(program, ranks, tmp_path):
    script = ROOT / "benchmarks" / "several_gpus.py"
    result = tmp_path / "rows.json"
    arguments = (str(script), program, "--ranks", str(ranks), "--json", str(result))
    done = python(*arguments, imports=IMPORTS, env=environment({}), timeout=SECONDS)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(result.read_text())["rows"]
    assert [row["rank"] for row in rows] == list(range(ranks))
    for row in rows:
        assert abs(row["planned"] / row["measured"] - 1) < 0.01, row
        assert row["communication"] > 0
