"""kornia: classical computer vision, differentiable."""

from __future__ import annotations

from typing import Any

import kornia
import torch

from ..catalog import program


def pictures(count: int = 2, size: int = 16) -> torch.Tensor:
    return torch.rand(count, 3, size, size)


@program(
    {
        "item": "whether edges still grow; whether widths are positive",
    }
)
def filters() -> Any:
    images = pictures()
    return (
        kornia.filters.gaussian_blur2d(images, (5, 5), (1.5, 1.5)),
        kornia.filters.sobel(images),
        kornia.filters.median_blur(images, (3, 3)),
        kornia.filters.canny(images),
        kornia.filters.bilateral_blur(images, (3, 3), 0.1, (1.0, 1.0)),
        kornia.filters.unsharp_mask(images, (3, 3), (1.0, 1.0)),
    )


@program(
    {
        "item": "whether ranges are in bounds; whether there is anything to change",
        "tolist": "the order of changes; corners to cut out",
    }
)
def augmentations() -> Any:
    chain = kornia.augmentation.AugmentationSequential(
        kornia.augmentation.RandomHorizontalFlip(p=0.5),
        kornia.augmentation.RandomAffine(15.0, translate=(0.1, 0.1), p=1.0),
        kornia.augmentation.ColorJitter(0.2, 0.2, 0.2, 0.1, p=1.0),
        kornia.augmentation.RandomErasing(p=0.5),
        kornia.augmentation.RandomCrop((12, 12)),
        data_keys=["input", "mask"],
    )
    images = pictures(4)
    return chain(images, (images[:, :1] > 0.5).float())


@program()
def a_homography_is_learned() -> Any:
    source, target = pictures(1), pictures(1)
    matrix = torch.eye(3)[None].requires_grad_()
    optimizer = torch.optim.Adam([matrix], lr=1e-2)
    for _ in range(3):
        optimizer.zero_grad()
        warped = kornia.geometry.transform.warp_perspective(source, matrix, (16, 16))
        loss = torch.nn.functional.l1_loss(warped, target)
        loss.backward()
        optimizer.step()
    return matrix, optimizer, warped


@program()
def geometry() -> Any:
    images, points = pictures(), torch.rand(2, 5, 2)
    rotations = kornia.geometry.axis_angle_to_rotation_matrix(torch.randn(4, 3))
    return (
        kornia.geometry.transform.rotate(images, torch.tensor([10.0, 30.0])),
        kornia.geometry.transform.resize(images, (8, 8)),
        kornia.geometry.transform.pyrdown(images),
        kornia.geometry.transform_points(torch.eye(3)[None].repeat(2, 1, 1), points),
        kornia.geometry.rotation_matrix_to_axis_angle(rotations),
        kornia.geometry.homography.find_homography_dlt(torch.rand(1, 6, 2), torch.rand(1, 6, 2)),
    )


@program()
def colors_and_losses() -> Any:
    left, right = pictures(), pictures().requires_grad_()
    loss = kornia.losses.ssim_loss(left, right, 5) + kornia.losses.total_variation(right).mean()
    loss = loss + kornia.losses.psnr_loss(left, right, 1.0)
    loss.backward()
    colours = [getattr(kornia.color, f"rgb_to_{name}")(left) for name in ("hsv", "lab", "ycbcr", "grayscale")]
    return loss, right, colours, kornia.enhance.equalize(left), kornia.enhance.adjust_gamma(left, 0.8)


@program(
    {
        "item": "whether widths are positive",
        "the result of aten.index.Tensor depends on data": "pairs that match",
    }
)
def features() -> Any:
    image = pictures(1, 32).mean(1, keepdim=True)
    responses = kornia.feature.harris_response(image)
    detector = kornia.feature.CornerHarris(0.04)
    left, right = torch.rand(6, 8), torch.rand(7, 8)
    return (
        responses,
        detector(image),
        kornia.feature.match_mnn(left, right),
        kornia.feature.HardNet(pretrained=False)(torch.rand(2, 1, 32, 32)),
    )
