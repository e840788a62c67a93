"""Known shapes on a planned GPU agree with PyTorch's Python shape rules."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map_only

import lazyviz
from lazyviz.record.shapes import fast_shape_rules

from .test_fast_shape_rules import wrong as wrong  # a fixture

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
NAMES = (
    fast_shape_rules._OF_NUMBERS
    | fast_shape_rules._OF_FLOATS
    | {"clone"}
    | {"nn.functional.silu", "nn.functional.gelu"}
)
VIEWS = {
    "view", "reshape", "transpose", "permute", "expand", "unsqueeze", "squeeze", "select", "narrow", "split",
    "chunk", "unbind", "t", "movedim", "flatten", "diagonal", "unfold", "as_strided",
}  # fmt: skip
ENTRIES = [
    entry for entry in op_db if entry.name in NAMES | VIEWS and entry.variant_test_name != "partial_views"
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.full_name)
def test_known_is_what_shape_rules_say(entry, dtype, wrong):
    if dtype not in entry.supported_dtypes("cuda"):
        pytest.skip("the kernel has no such dtype")
    recorded = 0
    for sample in itertools.islice(entry.sample_inputs("cpu", dtype), 30):
        tensors = [
            item for item in tree_leaves((sample.input, sample.args)) if isinstance(item, torch.Tensor)
        ]
        if any(item.layout != torch.strided for item in tensors):
            continue
        for form in (sample, sample.noncontiguous()):
            with lazyviz.lazy(device="H100-80GB") as graph:
                given = (form.input, form.args, form.kwargs)
                first, args, kwargs = tree_map_only(torch.Tensor, lambda item: item.cuda(), given)
                entry(first, *args, **kwargs)
            recorded += len(graph.nodes)
            lazyviz.reset()
    assert recorded
    assert not wrong, wrong[0]


def test_memory_formats_are_those_of_the_kernel(wrong):
    with lazyviz.lazy(device="H100-80GB"):
        image = torch.empty(2, 3, 4, 5, device="cuda").to(memory_format=torch.channels_last)
        both = torch.cat([image, image], dim=1)
        assert both.is_contiguous(memory_format=torch.channels_last)
        assert (image + 1).stride() == image.stride()
        assert (image[:, :1] * image).stride() == image.stride()
        turned = torch.empty(1, 1, 8, 16, device="cuda").transpose(1, 2)
        assert torch.cat([torch.empty(1, 8, 3, 16, device="cuda"), turned], dim=-2).is_contiguous()
    assert not wrong, wrong[0]
