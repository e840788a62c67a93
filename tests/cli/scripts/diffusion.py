"""An unconditional diffusion model with diffusers and accelerate: noise, prediction, EMA, clipping."""

import argparse
import logging

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel

logger = logging.getLogger(__name__)


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--resolution", type=int, default=16)
    parser.add_argument("--train_batch_size", type=int, default=4)
    parser.add_argument("--num_epochs", type=int, default=1)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--mixed_precision", default="no", choices=["no", "fp16", "bf16"])
    return parser.parse_args()


def main(args):
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision=args.mixed_precision
    )
    set_seed(0)
    model = UNet2DModel(
        sample_size=args.resolution, in_channels=1, out_channels=1, layers_per_block=1, norm_num_groups=4,
        block_out_channels=(8, 16), down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
    )  # fmt: skip
    ema = EMAModel(model.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=model.config)
    noise_scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.95, 0.999), weight_decay=1e-6)
    images = torch.randn(16, 1, args.resolution, args.resolution)
    loader = torch.utils.data.DataLoader(images, batch_size=args.train_batch_size, shuffle=True)
    lr_scheduler = get_scheduler(
        "cosine", optimizer, num_warmup_steps=1, num_training_steps=len(loader) * args.num_epochs
    )
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
    ema.to(accelerator.device)
    for epoch in range(args.num_epochs):
        model.train()
        for step, clean in enumerate(loader):
            noise = torch.randn(clean.shape, device=clean.device)
            timesteps = torch.randint(0, 100, (clean.shape[0],), device=clean.device).long()
            noisy = noise_scheduler.add_noise(clean, noise, timesteps)
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(noisy, timesteps).sample.float(), noise.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.step(model.parameters())
            print({"loss": loss.detach().item(), "lr": lr_scheduler.get_last_lr()[0], "step": step})
    accelerator.end_training()


if __name__ == "__main__":
    main(parse_args())
