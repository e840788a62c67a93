"""What PyTorch's kernels would choose, asked of PyTorch itself: private APIs, each with its reason.

Beside :mod:`lazyviz._torch`, for the plan alone.  ``tests/test_torch_private.py`` checks each entry.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_ONE = torch.empty(1)


def conv_backend(
    shape: Sequence[int],
    weight: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    dtype: torch.dtype,
) -> str:
    """The kernel that a convolution of these sizes takes on the CPU: ``"Mkldnn"``, ``"Slow2d"``, ...

    ``at::native::select_conv_backend`` (Convolution.cpp) looks at sizes, type, threads and flags, so
    tensors without memory of their own answer; its rules have no public form.
    """
    one = _ONE if dtype == torch.float32 else torch.empty(1, dtype=dtype)
    with torch._C._DisableTorchDispatch():  # nothing of this is the user's: no mode need see it
        backend = torch._C._select_conv_backend(
            one.expand(*shape),
            one.expand(*weight),
            None,
            list(stride),
            list(padding),
            list(dilation),
            transposed,
            list(output_padding),
            groups,
        )
    name = str(backend.name)
    # The Python binding has no name for this one value of the C++ enumeration.
    return "MkldnnTranspose" if name == "???" and transposed else name
