"""The planned rank: ``torch.distributed`` is initialized for it without the other ranks.

Process groups and meshes that the block's code has created are kept for the next block of the same rank, so
that a model that was sharded in one cell can be trained in the next.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch

from ...process.global_state_transaction import Transaction
from ...torch_internals import fake_process_groups
from ...torch_internals.fake_process_groups import GroupTables
from ..interception.attribute_patches import CodePatch, Patches
from ..tape import Tape, tape
from ..tracked_storages import TrackedStorage
from . import collective_recording, cross_rank_checks, dtensors, pipeline_stage_shapes

RANKS_OF_A_MACHINE = 8
"""The assumed number of GPUs per machine, if the world has more ranks than that."""

_kept: dict[tuple[int, int, str], GroupTables] = {}


def world_size(mesh: Sequence[int] | int | None, rank: int) -> int:
    """The number of ranks of ``mesh``; 0 without a mesh, for a program that is not distributed.

    Raises:
        ValueError: the mesh or the rank is invalid.
        RuntimeError: this PyTorch has no ``torch.distributed``.
    """
    if mesh is None:
        if rank:
            raise ValueError(f"rank {rank} needs a mesh, such as mesh=(8,)")
        return 0
    sizes = (mesh,) if isinstance(mesh, int) else tuple(mesh)
    if not sizes or any(type(size) is not int or size < 1 for size in sizes):
        raise ValueError(
            f"mesh must be the number of ranks in each dimension, such as (8,) or (2, 4), got {mesh!r}"
        )
    size = math.prod(sizes)
    if type(rank) is not int or not 0 <= rank < size:
        raise ValueError(f"rank must be from 0 to {size - 1} in a mesh of {size}, got {rank!r}")
    if not fake_process_groups.is_available():
        raise RuntimeError("this PyTorch is built without torch.distributed: mesh= cannot be planned")
    return size


def local_world_size(size: int) -> int:
    return max(1, min(size, RANKS_OF_A_MACHINE))


def forget() -> None:
    """Forget the groups and meshes of earlier blocks."""
    _kept.clear()


class OneOfMany(Transaction):
    """While entered, ``torch.distributed`` sees this process as rank ``rank`` of ``size``.

    Raises ``RuntimeError`` on entry if another group is already initialized.
    """

    name = "this rank"

    def __init__(self, tape: Tape, size: int, rank: int, device_type: str) -> None:
        self.size, self.rank, self.device_type = size, rank, device_type
        self._tape = tape
        self._before: GroupTables | None = None
        self._environment: dict[str, str | None] = {}
        self._patches = Patches()
        self._users_own = False
        self.alike: set[TrackedStorage] = set()
        self.starting = False

    def refuse_others(self) -> None:
        """Raise ``RuntimeError`` if a group is initialized that is not this rank's."""
        distributed = torch.distributed
        if not distributed.is_initialized():
            return
        size, rank = distributed.get_world_size(), distributed.get_rank()
        if fake_process_groups.is_fake() and (size, rank) == (self.size, self.rank):
            self._users_own = True
            return
        raise RuntimeError(
            f"torch.distributed is already initialized, with backend {fake_process_groups.backend_name()} "
            f"as rank {rank} of "
            f"{size}: a block for rank {self.rank} of {self.size} needs "
            "torch.distributed.destroy_process_group() before it"
        )

    def begin(self) -> None:
        self.refuse_others()
        self.undo_by(self._take_back)
        self._tape.recording.world = self
        self._set_environment()
        for owner, name, value in fake_process_groups.patches():
            self._patches.set(owner, name, value)
        cross_rank_checks.install(self._patches)
        dtensors.install(self._patches, self._tape)
        pipeline_stage_shapes.install(self._patches, self._tape)
        assert _init is not None
        _init.set(_tolerant)
        if not self._users_own:
            kept = _kept.pop(self._key, None)
            self._before = fake_process_groups.exchange(kept or GroupTables())
            if kept is None:
                self._start(self.backend)

    def _start(self, backend: str) -> None:
        self.starting = True
        try:
            fake_process_groups.start(self.rank, self.size, backend)
        finally:
            self.starting = False

    @property
    def _key(self) -> tuple[int, int, str]:
        return self.size, self.rank, self.device_type

    @property
    def backend(self) -> str:
        """The result of ``get_backend`` until the program requests another backend."""
        return "nccl" if self.device_type == "cuda" else "gloo"

    def _take_back(self) -> None:
        if self._before is not None:
            after = fake_process_groups.exchange(self._before)
            self._before = None
            if after.default is not None:
                _kept[self._key] = after
        if _init is not None:
            _init.restore()
        pipeline_stage_shapes.remove()
        self._patches.restore()
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if self._tape.recording.world is self:
            self._tape.recording.world = None

    remove = _take_back

    def _set_environment(self) -> None:
        """The environment variables that ``torchrun`` sets for each process."""
        here = local_world_size(self.size)
        names: Mapping[str, int | str] = {
            "RANK": self.rank,
            "WORLD_SIZE": self.size,
            "LOCAL_RANK": self.rank % here,
            "LOCAL_WORLD_SIZE": here,
            "GROUP_RANK": self.rank // here,
            "GROUP_WORLD_SIZE": -(-self.size // here),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
        }
        self._environment = {name: os.environ.get(name) for name in names}
        os.environ.update({name: str(value) for name, value in names.items()})

    # --- called by the recorder -------------------------------------------------------

    def collective(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return collective_recording.record(self._tape, op, args, kwargs)

    def functional(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], recorded: Callable[..., Any]
    ) -> Any:
        return collective_recording.record_functional(self._tape, op, args, kwargs, recorded)

    # --- init_process_group -------------------------------------------------------------

    def initialize(
        self, backend: str | None = None, size: int = -1, rank: int = -1, device_id: Any = None
    ) -> None:
        """Replaces ``init_process_group``: the groups of the program already exist.

        Raises ``RuntimeError`` for a world of another size or another rank.
        """
        if size not in (-1, self.size) or rank not in (-1, self.rank):
            raise RuntimeError(
                f"init_process_group(rank={rank}, world_size={size}) in a block for rank {self.rank} of "
                f"{self.size}"
            )
        if not torch.distributed.is_initialized():  # the program has destroyed them
            self._start(str(backend or self.backend))
        elif backend is not None:
            fake_process_groups.name_backend(str(backend))


def _answered(world_size: int, rank: int, backend: Any) -> bool:
    """Whether this world handles a call of ``init_process_group``, instead of PyTorch."""
    world = tape.recording.world
    if not isinstance(world, OneOfMany) or world.starting:
        return False
    world.initialize(backend, world_size, rank)
    return True


def _tolerant(original: FunctionType) -> FunctionType:
    def init_process_group(
        backend: Any = None,
        init_method: Any = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        *rest: Any,
        _original: Any = original,
        _answer: Any = _answered,
        **named: Any,
    ) -> None:
        if _answer(world_size, rank, backend):
            return None
        return _original(backend, init_method, timeout, world_size, rank, *rest, **named)

    return init_process_group  # type: ignore[return-value]


_init = CodePatch(fake_process_groups.INIT_PROCESS_GROUP) if fake_process_groups.is_available() else None
