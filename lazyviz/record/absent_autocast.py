"""``torch.autocast("cuda")`` for a card that is not there."""

from __future__ import annotations

from .patches import Patches


class AutocastKernels:
    def install(self, patches: Patches) -> None: ...

    def remove(self) -> None: ...
