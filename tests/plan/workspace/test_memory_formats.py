"""Copies that image kernels make for a memory format, as the allocator sees them, and layouts of results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import lazyviz

from ..profiler import allocated_by

aten = torch.ops.aten
Calls = Iterator[tuple[str, Callable[[], Any]]]
SAMPLES, CHANNELS = 3, 8
SIZES = (6, 7, 5)
SUMS = 64  # bytes: sums for each channel of batch norm's general kernel, which a plan rounds


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def layouts(sizes: Sequence[int]) -> list[tuple[str, Tensor]]:
    dims = len(sizes)
    shape = (SAMPLES, CHANNELS, *sizes)
    backwards = list(range(dims + 2))[::-1]
    image = torch.randn(shape)
    found = [
        ("contiguous", image),
        ("expanded", torch.ones(()).expand(shape)),
        ("turned", image.permute(backwards).contiguous().permute(backwards)),
        ("every second channel", torch.randn(SAMPLES, 2 * CHANNELS, *sizes)[:, ::2]),
    ]
    last = {2: torch.channels_last, 3: torch.channels_last_3d}.get(dims)
    return [*found, ("channels last", image.to(memory_format=last))] if last else found


def resizing() -> Calls:
    for dims, names in (
        (1, "upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d"),
        (2, "upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d"),
        (2, "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"),
        (3, "upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d"),
    ):
        larger = [2 * size for size in SIZES[:dims]]
        image = [SAMPLES, CHANNELS, *SIZES[:dims]]
        for layout, gradient in layouts(larger):
            for name in names.split():
                options = () if "nearest" in name else (False,)
                backward = getattr(aten, f"{name}_backward")
                yield f"{name}, {layout}", partial(backward, gradient, larger, image, *options)


def padding() -> Calls:
    for dims in (1, 2, 3):
        sizes, pads = SIZES[:dims], [1, 2] * dims
        for name in (f"reflection_pad{dims}d", f"replication_pad{dims}d"):
            pad, backward = getattr(aten, name), getattr(aten, f"{name}_backward")
            for layout, image in layouts(sizes):
                yield f"{name}, {layout}", partial(pad, image, pads)
                for of_gradient, gradient in layouts([size + 3 for size in sizes]):
                    yield f"{backward}, {layout}, {of_gradient}", partial(backward, gradient, image, pads)


def pooling() -> Calls:
    for dims in (2, 3):
        two, three, none, one = ([size] * dims for size in (2, 3, 0, 1))
        names = (f"avg_pool{dims}d", f"max_pool{dims}d_with_indices")
        adaptive_names = (f"_adaptive_avg_pool{dims}d", f"adaptive_max_pool{dims}d")
        average, largest, adaptive_average, adaptive_largest = (
            (getattr(aten, name), getattr(aten, f"{name}_backward")) for name in (*names, *adaptive_names)
        )
        unpool = partial(getattr(aten, f"max_unpool{dims}d"), output_size=[6] * dims)
        if dims == 3:
            unpool = partial(unpool, stride=two, padding=none)
        for layout, image in layouts([6] * dims):
            where, adaptively = largest[0](image, two)[1], adaptive_largest[0](image, three)[1]
            yield f"{average[0]}, {layout}", partial(average[0], image, two)
            yield f"{largest[0]}, {layout}", partial(largest[0], image, two)
            yield f"{adaptive_average[0]}, {layout}", partial(adaptive_average[0], image, three)
            yield f"{adaptive_largest[0]}, {layout}", partial(adaptive_largest[0], image, three)
            for of_gradient, gradient in layouts(three):
                for backward, *rest in (
                    (average[1], image, two, [], none, False, True, None),
                    (largest[1], image, two, two, none, one, False, where),
                    (adaptive_average[1], image),
                    (adaptive_largest[1], image, adaptively),
                    (unpool, where),
                ):
                    yield f"{backward}, {layout}, {of_gradient}", partial(backward, gradient, *rest)


def norms() -> Calls:
    weight, mean, scale = torch.ones(CHANNELS), torch.zeros(SAMPLES, 4), torch.ones(SAMPLES, 4)
    for dims in (1, 2, 3):
        for layout, image in layouts(SIZES[:dims]):
            of_batch = (image, weight, weight, None, None, True, 0.1, 1e-5)
            yield f"batch_norm, {dims}, {layout}", partial(aten.native_batch_norm, *of_batch)
            if layout not in ("contiguous", "channels last"):
                continue  # ATen copies it before the operator
            sizes = (SAMPLES, CHANNELS, image[0, 0].numel(), 4)
            forward = partial(aten.native_group_norm, image, weight, weight, *sizes, 1e-5)
            yield f"group_norm, {dims}, {layout}", forward
            given = (image, image, mean, scale, weight, *sizes, [True] * 3)
            yield f"gradient, {dims}, {layout}", partial(aten.native_group_norm_backward, *given)


def layout_of(results: Any) -> list[Any]:
    tensors = results if isinstance(results, tuple) else (results,)
    return [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]


@pytest.mark.parametrize("kernels", [resizing, padding, pooling, norms])
def test_kernels_copy_for_the_memory_format_that_they_compute_in(kernels: Callable[[], Calls]) -> None:
    wrong = {}
    for name, call in kernels():
        laid_out = layout_of(call())
        peak, left = allocated_by(call)
        with lazyviz.lazy() as graph:
            kept = call()
        need = sum(need.nbytes for need in graph.plan().scratch.values())
        if layout_of(kept) != laid_out or abs(need - (peak - left)) > SUMS:
            wrong[name] = (need, peak - left, layout_of(kept), laid_out)
        del kept
        lazyviz.reset()
    assert not wrong
