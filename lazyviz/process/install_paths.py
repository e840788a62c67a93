"""Install paths of lazyviz and PyTorch, which distinguish their frames from the user's."""

from __future__ import annotations

import os

import torch

PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
