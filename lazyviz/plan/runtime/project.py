"""The projected time of a record on a device: a card's by its rates, the host's by its calibration."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...graph.ir import Node
from ..devices.devices import Device, DeviceProfile
from ..devices.profiles import PROFILES
from .cpu import known_rates, project_on_cpu
from .kernels import Card
from .projection import Projection, project


def project_on(nodes: Sequence[Node], target: Device | DeviceProfile) -> Projection | None:
    """The time of ``nodes`` on ``target``; ``None`` where too little is known of either."""
    if target.name == "cpu":
        rates = known_rates()
        return project_on_cpu(nodes, rates) if rates is not None else None
    card = card_of(target)
    return project(nodes, card) if card is not None else None


def card_of(target: Device | DeviceProfile) -> Card | None:
    """What is known of a card's speed, with today's settings of TF32; ``None`` of what is no known card."""
    profile = target if isinstance(target, DeviceProfile) else _profile_of(target)
    if profile is None or profile.rates is None:
        return None
    return Card(
        profile.name,
        profile.rates,
        profile.compute_capability,
        torch.get_float32_matmul_precision() != "highest",
        bool(torch.backends.cudnn.allow_tf32),
    )


def _profile_of(device: Device) -> DeviceProfile | None:
    """The profile whose name is part of the driver's name of a present card, and whose memory is as large."""
    if device.total_bytes is None or not device.name.startswith("cuda"):
        return None
    model = _plain(device.model)
    near = [
        profile
        for name, profile in PROFILES.items()
        if _plain(_without_size(name)) in model and abs(profile.total_bytes / device.total_bytes - 1) < 0.1
    ]
    return max(near, key=lambda profile: len(_without_size(profile.name)), default=None)


def _without_size(name: str) -> str:
    head, _, tail = name.rpartition("-")
    return head if tail.endswith("GB") else name


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
