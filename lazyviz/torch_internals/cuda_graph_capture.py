"""Private torch APIs for CUDA Graph capture, each with its reason.

``tests/execute/cuda_graphs/test_cuda_graphs_device.py`` checks that they are there.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

Pool = tuple[int, int]

copy_each: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
"""Copy each tensor of the second list to that of the first, with one kernel for all if they are of one type.

Dozens of results come out of a graph's memory after each launch.  Optimizers use it; it has no public name.
"""


def clear_cublas_workspaces() -> None:
    """Release cuBLAS's workspaces, so that captured kernels allocate one in the graph's own memory.

    One from outside would be freed by whoever clears them next, and the graph would go on writing there.
    There is no public form; ``torch._inductor.cudagraph_trees`` does the same.
    """
    torch._C._cuda_clearCublasWorkspaces()


def end_broken_capture(index: int, pool: Pool) -> None:
    """Tell the allocator that a capture is over which CUDA has ended with an error.

    ``CUDAGraph.capture_end`` (ATen's CUDAGraph.cpp) raises before it does so, and never gives back its share
    of ``pool``; memory freed later would wait for the end of that capture for ever.
    """
    with suppress(RuntimeError):  # it was told: the error came later
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
