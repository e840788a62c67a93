"""diffusers: a network that takes noise away, trained and sampled from."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from diffusers.training_utils import EMAModel

from ..catalog import program


def unet() -> diffusers.UNet2DModel:
    return diffusers.UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )


@program()
def training_with_an_average_of_the_weights() -> Any:
    model, scheduler = unet(), diffusers.DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = diffusers.optimization.get_cosine_schedule_with_warmup(optimizer, 2, 6)
    average = EMAModel(model.parameters(), decay=0.9)
    losses = []
    for _ in range(4):
        clean, noise = torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 8)
        times = torch.randint(0, 100, (4,))
        loss = F.mse_loss(model(scheduler.add_noise(clean, noise, times), times).sample, noise)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        average.step(model.parameters())
        losses.append(loss.detach())
    return model, optimizer, average.state_dict(), losses


@program(
    {
        "numpy": "pictures are arrays",
    }
)
def a_ddpm_pipeline() -> Any:
    pipeline = diffusers.DDPMPipeline(unet(), diffusers.DDPMScheduler(num_train_timesteps=50))
    pipeline.set_progress_bar_config(disable=True)
    return pipeline(batch_size=2, num_inference_steps=5, output_type="np").images


@program(
    {
        "numpy": "pictures are arrays",
    }
)
def a_ddim_pipeline_with_a_generator() -> Any:
    pipeline = diffusers.DDIMPipeline(unet(), diffusers.DDIMScheduler(num_train_timesteps=50))
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(3)
    return pipeline(generator=generator, num_inference_steps=4, eta=0.5, output_type="np").images


def sampled(scheduler: Any) -> torch.Tensor:
    model = unet().eval()
    scheduler.set_timesteps(4)
    sample = torch.randn(2, 3, 8, 8) * scheduler.init_noise_sigma
    with torch.no_grad():
        for time in scheduler.timesteps:
            noise = model(scheduler.scale_model_input(sample, time), time).sample
            sample = scheduler.step(noise, time, sample).prev_sample
    return sample


@program(
    {
        "numpy": "noise levels are computed with NumPy",
        "the result of aten.nonzero.default depends on data": "which step of the schedule a time is",
    }
)
def samples_of_several_schedulers() -> Any:
    return [
        sampled(scheduler(num_train_timesteps=50))
        for scheduler in (
            diffusers.EulerDiscreteScheduler,
            diffusers.EulerAncestralDiscreteScheduler,
            diffusers.DPMSolverMultistepScheduler,
            diffusers.PNDMScheduler,
            diffusers.UniPCMultistepScheduler,
            diffusers.HeunDiscreteScheduler,
            diffusers.LMSDiscreteScheduler,
        )
    ]


@program()
def an_autoencoder() -> Any:
    model = diffusers.AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, latent_channels=2, sample_size=8
    )
    optimizer = torch.optim.Adam(model.parameters())
    images = torch.randn(2, 3, 8, 8)
    for _ in range(2):
        posterior = model.encode(images).latent_dist
        loss = F.mse_loss(model.decode(posterior.sample()).sample, images) + 0.1 * posterior.kl().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, loss
