"""MONAI: segmentation in three dimensions."""

from __future__ import annotations

from typing import Any

import monai
import numpy
import torch
from monai import transforms
from monai.inferers import sliding_window_inference
from monai.losses import DiceCELoss, DiceLoss, FocalLoss
from monai.metrics import DiceMetric, compute_hausdorff_distance
from monai.networks.nets import UNETR, SegResNet, UNet

from ..catalog import program


def unet() -> UNet:
    return UNet(3, 1, 2, channels=(4, 8, 8), strides=(2, 2), num_res_units=1, norm="batch", dropout=0.1)


@program()
def a_unet_learns_to_segment() -> Any:
    model, loss_of = unet(), DiceLoss(to_onehot_y=True, softmax=True)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    volumes, labels = torch.randn(2, 1, 8, 8, 8), torch.randint(0, 2, (2, 1, 8, 8, 8))
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model(volumes), labels)
        loss.backward()
        optimizer.step()
    return model, optimizer, loss


@program()
def windows_that_slide() -> Any:
    model = unet().eval()
    with torch.no_grad():
        return sliding_window_inference(torch.randn(1, 1, 12, 12, 12), (8, 8, 8), 2, model, mode="gaussian")


@program(
    {
        "item": "whether there is anything of a class",
        "the result of aten.masked_select.default depends on data": "the voxels of a class",
        "as_subclass": "tensors of a class of MONAI's own",
        "numpy": "volumes as arrays",
    }
)
def dice_and_distance() -> Any:
    found, wanted = (torch.randint(0, 2, (2, 2, 8, 8)).float() for _ in range(2))
    metric = DiceMetric(reduction="mean_batch")
    metric(found, wanted)
    return metric.aggregate(), compute_hausdorff_distance(found, wanted)


@program()
def losses() -> Any:
    scores, labels = torch.randn(2, 3, 6, 6, requires_grad=True), torch.randint(0, 3, (2, 1, 6, 6))
    loss = DiceCELoss(to_onehot_y=True, softmax=True)(scores, labels)
    loss = loss + FocalLoss(to_onehot_y=True, use_softmax=True)(scores, labels)
    loss.backward()
    return loss, scores


@program(
    {
        "item": "whether all intensities are one",
        "as_subclass": "tensors of a class of MONAI's own",
        "numpy": "volumes as arrays",
        "data_ptr": "whether a grid was copied",
    }
)
def transforms_of_volumes() -> Any:
    monai.utils.set_determinism(3)
    chain = transforms.Compose(
        [
            transforms.EnsureChannelFirst(channel_dim="no_channel"),
            transforms.ScaleIntensity(),
            transforms.RandRotate90(prob=1.0),
            transforms.RandFlip(prob=1.0, spatial_axis=0),
            transforms.RandGaussianNoise(prob=1.0),
            transforms.RandAffine(prob=1.0, rotate_range=0.3, padding_mode="border"),
            transforms.Resize((6, 6, 6)),
            transforms.NormalizeIntensity(),
        ]
    )
    found = chain(numpy.random.rand(8, 8, 8).astype("float32"))
    return found.as_tensor(), found.affine


@program()
def other_networks() -> Any:
    volume = torch.randn(1, 1, 16, 16)
    transformer = UNETR(
        1, 2, (16, 16), feature_size=4, hidden_size=16, mlp_dim=32, num_heads=2, spatial_dims=2
    )
    residual = SegResNet(spatial_dims=2, init_filters=8, blocks_down=(1, 1), blocks_up=(1,))
    loss = transformer(volume).pow(2).mean() + residual(volume).pow(2).mean()
    loss.backward()
    return transformer, residual, loss
