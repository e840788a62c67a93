"""Private torch APIs for CUDA Graph capture, each with its reason.

``tests/execute/cuda_graphs/test_torch_cuda_calls.py`` checks that they exist.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import torch

Pool = tuple[int, int]

copy_each: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
"""Copy each tensor of the second list to that of the first, with a single kernel if all have the same dtype.

After each launch, dozens of results are copied out of a graph's memory. Optimizers use this function; it has
no public name.
"""


def clear_cublas_workspaces() -> None:
    """Release cuBLAS's workspaces, so that captured kernels allocate one in the graph's own memory.

    A workspace from outside would be freed by whatever clears workspaces next, and the graph would still
    write to it. There is no public function; ``torch._inductor.cudagraph_trees`` does the same.
    """
    torch._C._cuda_clearCublasWorkspaces()


def end_broken_capture(index: int, pool: Pool) -> None:
    """Tell the allocator that a capture has ended which failed with a CUDA error.

    ``CUDAGraph.capture_end`` (ATen's CUDAGraph.cpp) raises before it does so, and never releases its
    reference to ``pool``. Memory that is freed later would wait forever for the end of that capture.
    """
    with suppress(RuntimeError):  # the capture had already ended: the error came later
        torch._C._cuda_endAllocateToPool(index, pool)
        torch._C._cuda_releasePool(index, pool)
