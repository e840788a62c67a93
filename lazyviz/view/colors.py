"""Tints of layer kinds, as in js/src/styles/layers.css, on a light page."""

from __future__ import annotations

LAYER_TINTS = {
    "embedding": "#e2f3f8",
    "linear": "#e9edfb",
    "norm": "#eceff3",
    "dropout": "#eceff3",
    "attention": "#f9e9f4",
    "activation": "#fbf1dd",
    "loss": "#fbebe3",
    "block": "#e8ebf0",
    "optimizer": "#f0eaf8",
}
