"""``LazyvizCallback`` for the Trainer of transformers.

::

    from lazyviz.integrations.transformers import LazyvizCallback

    Trainer(..., callbacks=[LazyvizCallback(fail_above="38GiB", picture="graph.html")])
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler

from ..plan.devices.device_lookup import DeviceLike
from .first_training_steps import Findings, FirstSteps, logger
from .tensorboard_wandb_mlflow import attempt, to_mlflow, to_tensorboard, to_wandb


class LazyvizCallback(TrainerCallback):
    """Records, plans, and evaluates the first optimizer steps, and then does nothing more.

    The memory that they need, and projected and measured peaks, go to the Trainer's loggers (as
    ``lazyviz/needed_bytes`` and so on), to its ``state.log_history``, and as text to Python's logger
    ``lazyviz``.  The whole plan and the picture go to TensorBoard, Weights & Biases, and MLflow.
    Arguments are those of :class:`lazyviz.integrations.first_training_steps.FirstSteps`.  A relative
    ``picture`` is relative to the Trainer's ``output_dir``.

    If training fails within these steps, the Trainer does not notify its callbacks; call ``lazyviz.reset()``
    to close the open block.
    """

    def __init__(
        self,
        plan_first_step: bool = True,
        fail_above: int | str | None = None,
        device: DeviceLike | None = None,
        steps: int = 2,
        picture: str | Path | None = None,
    ) -> None:
        self._first = FirstSteps(plan_first_step, fail_above, device, steps, picture)
        self.findings: Findings | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._first.begin("the first steps of transformers' Trainer")

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._publish(self._first.stepped(_folder(args, state)), args, state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._publish(self._first.ended(_folder(args, state)), args, state, control)

    def _publish(self, found: Findings | None, args: Any, state: Any, control: Any) -> None:
        if found is None:
            return
        self.findings = found
        if state.is_world_process_zero:
            logger.info(found.text)
        logs = dict(found.numbers)
        state.log_history.append({**logs, "step": state.global_step})
        handler = _handler()
        if handler is not None:
            handler.on_log(args, state, control, logs)
            for each in handler.callbacks if state.is_world_process_zero else ():
                attempt(_send, each, found, state.global_step)


def _folder(args: Any, state: Any) -> str | None:
    """Where the first rank writes the picture; ``None`` for the others."""
    return args.output_dir if state.is_world_process_zero else None


def _send(to: Any, found: Findings, step: int) -> None:
    """Send the plan and the picture to a callback of transformers, if it is a logger that can show them."""
    if getattr(to, "tb_writer", None) is not None:
        to_tensorboard(to.tb_writer, found.plan, found.picture, step)
    if getattr(getattr(to, "_wandb", None), "run", None) is not None:
        to_wandb(to._wandb.run, found.plan, found.picture)
    if (mlflow := getattr(to, "_ml_flow", None)) is not None and mlflow.active_run() is not None:
        to_mlflow(mlflow.log_text, mlflow.log_artifact, found.plan, found.picture)


def _handler() -> Any:
    """The Trainer's ``CallbackHandler``, which knows its loggers; it is found on the stack, because callbacks
    get no reference to it.
    """
    frame = sys._getframe(1)
    for _ in range(10):
        found = frame.f_locals.get("self")
        if isinstance(found, CallbackHandler):
            return found
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None
