"""``LazyvizCallback`` for the Trainer of Lightning (``lightning`` or ``pytorch_lightning``).

::

    from lazyviz.integrations.lightning import LazyvizCallback

    Trainer(..., callbacks=[LazyvizCallback(fail_above="38GiB", picture="graph.html")])
"""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..plan.devices.device_lookup import DeviceLike
from .first_training_steps import Findings, FirstSteps, logger
from .tensorboard_wandb_mlflow import attempt, to_mlflow, to_tensorboard, to_wandb

if TYPE_CHECKING:
    Callback: Any = object
elif importlib.util.find_spec("lightning") is not None:
    from lightning.pytorch import Callback
else:
    from pytorch_lightning import Callback


class LazyvizCallback(Callback):
    """Records, plans, and evaluates the first optimizer steps, and then does nothing more.

    The memory that they need, and projected and measured peaks, go to all loggers of the Trainer (as
    ``lazyviz/needed_bytes`` and so on), and as text to Python's logger ``lazyviz``.  The whole plan and the
    picture go to TensorBoard, Weights & Biases, and MLflow.  Arguments are those of
    :class:`lazyviz.integrations.first_training_steps.FirstSteps`.  A relative ``picture`` is relative to the
    Trainer's ``default_root_dir``.
    """

    def __init__(
        self,
        plan_first_step: bool = True,
        fail_above: int | str | None = None,
        device: DeviceLike | None = None,
        steps: int = 2,
        picture: str | Path | None = None,
    ) -> None:
        super().__init__()
        self._first = FirstSteps(plan_first_step, fail_above, device, steps, picture)
        self._step = 0
        self.findings: Findings | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._first.waits:
            self._step = trainer.global_step
            self._first.begin(f"the first steps of {type(pl_module).__name__}")

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:  # gradients are being accumulated
            return
        self._step = trainer.global_step
        self._publish(self._first.stepped(_folder(trainer)), trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._publish(self._first.ended(_folder(trainer)), trainer)

    def _publish(self, found: Findings | None, trainer: Any) -> None:
        if found is None:
            return
        self.findings = found
        if trainer.is_global_zero:
            logger.info(found.text)
        for each in trainer.loggers:
            each.log_metrics(dict(found.numbers), step=trainer.global_step)
            if trainer.is_global_zero:
                attempt(_send, each, found, trainer.global_step)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._first.abandon()


def _folder(trainer: Any) -> str | None:
    """Where the first rank writes the picture; ``None`` for the others."""
    return trainer.default_root_dir if trainer.is_global_zero else None


def _send(to: Any, found: Findings, step: int) -> None:
    """Send the plan and the picture to a logger of Lightning."""
    kinds = {kind.__name__ for kind in type(to).__mro__}  # of either package
    if "TensorBoardLogger" in kinds:
        to_tensorboard(to.experiment, found.plan, found.picture, step)
    elif "WandbLogger" in kinds:
        to_wandb(to.experiment, found.plan, found.picture)
    elif "MLFlowLogger" in kinds:
        client, run = to.experiment, to.run_id
        to_mlflow(partial(client.log_text, run), partial(client.log_artifact, run), found.plan, found.picture)
