"""Logging of the plan and the picture of a training run to TensorBoard, Weights & Biases, and MLflow.

Numbers go through the Trainer's own methods; text and pictures need each logger's own.  None of these
libraries is imported here: a Trainer that uses one has imported it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PLAN, GRAPH = "lazyviz/plan", "lazyviz/graph"

logger = logging.getLogger("lazyviz")


def to_tensorboard(writer: Any, plan: str, picture: Path | None, step: int) -> None:
    """``writer`` is a ``SummaryWriter``.  It shows pictures in PNG format, for which it needs Pillow."""
    indented = "\n".join(f"    {line}" for line in plan.splitlines())  # Markdown's form of a code block
    writer.add_text(PLAN, indented, step)
    if picture is not None and picture.suffix.lower() == ".png" and find_spec("PIL") is not None:
        import numpy as np
        from PIL import Image

        writer.add_image(GRAPH, np.asarray(Image.open(picture).convert("RGB")), step, dataformats="HWC")


def to_wandb(run: Any, plan: str, picture: Path | None) -> None:
    """``run`` is a run of Weights & Biases.  It shows PNG files as images, SVG and HTML as pages."""
    run.summary[PLAN] = plan
    wandb = sys.modules.get("wandb")
    if picture is None or wandb is None:
        return
    kind = picture.suffix.lower()
    if kind == ".png":
        run.log({GRAPH: wandb.Image(str(picture))})
    elif kind in (".svg", ".html"):
        run.log({GRAPH: wandb.Html(picture.read_text(encoding="utf-8"))})


def to_mlflow(
    log_text: Callable[[str, str], Any],
    log_artifact: Callable[[str, str], Any],
    plan: str,
    picture: Path | None,
) -> None:
    """The arguments are MLflow's functions of these names, for the current run.  It stores any file."""
    log_text(plan, f"{PLAN}.txt")
    if picture is not None:
        log_artifact(str(picture), "lazyviz")


def attempt(send: Callable[..., None], *arguments: Any) -> None:
    """Call ``send``; log a logger's error as a warning, because it must not end the training."""
    try:
        send(*arguments)
    except Exception as error:
        logger.warning("The plan was not logged (%s): %s: %s", send.__name__, type(error).__name__, error)
