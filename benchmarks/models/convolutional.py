"""Convolutional networks with the layers of timm's models of the same names, from transformers' classes."""

from __future__ import annotations

from typing import Any

_REGNET = {"layer_type": "x", "embedding_size": 32}
_LITE = {"tf_padding": False, "image_size": 224}
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mobilenetv1_100": ("MobileNetV1", _LITE),
    "mobilenetv2_100": ("MobileNetV2", _LITE),
    "efficientnet_b0": (
        "EfficientNet",
        {
            "image_size": 224, "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280,
            "dropout_rate": 0.0, "drop_connect_rate": 0.0,
        },
    ),
    "resnet18": (
        "ResNet", {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic"}
    ),
    "resnet50": ("ResNet", {}),
    "convnext_nano": ("ConvNext", {"depths": [2, 2, 8, 2], "hidden_sizes": [80, 160, 320, 640]}),
    "convnext_tiny": ("ConvNext", {}),
    "regnetx_004": (
        "RegNet",
        _REGNET | {"depths": [1, 2, 7, 12], "hidden_sizes": [32, 64, 160, 384], "groups_width": 16},
    ),
    "regnetx_016": (
        "RegNet",
        _REGNET | {"depths": [2, 4, 10, 2], "hidden_sizes": [72, 168, 408, 912], "groups_width": 24},
    ),
}  # fmt: skip


def convolutional(name: str) -> Any:
    """The model with timm's name, for 1,000 classes."""
    import transformers

    kind, settings = _MODELS[name]
    config = getattr(transformers, f"{kind}Config")(num_labels=1000, **settings)
    return getattr(transformers, f"{kind}ForImageClassification")(config)
