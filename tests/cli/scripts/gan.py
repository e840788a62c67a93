"""A GAN: two optimizers that take turns, losses of both printed."""

import argparse

import torch
from torch import nn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--niter", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(7)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    nz, batch = 8, 16
    netG = nn.Sequential(
        nn.ConvTranspose2d(nz, 16, 4, 1, 0, bias=False), nn.BatchNorm2d(16), nn.ReLU(True),
        nn.ConvTranspose2d(16, 1, 4, 2, 1, bias=False), nn.Tanh(),
    ).to(device)  # fmt: skip
    netD = nn.Sequential(
        nn.Conv2d(1, 16, 4, 2, 1, bias=False),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Conv2d(16, 1, 4, 1, 0),
        nn.Sigmoid(),
    ).to(device)
    criterion = nn.BCELoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for i in range(args.niter):
        netD.zero_grad()
        real = torch.randn(batch, 1, 8, 8).to(device)
        label = torch.full((batch,), 1.0, device=device)
        errD_real = criterion(netD(real).view(-1), label)
        errD_real.backward()
        fake = netG(torch.randn(batch, nz, 1, 1, device=device))
        label.fill_(0.0)
        errD_fake = criterion(netD(fake.detach()).view(-1), label)
        errD_fake.backward()
        errD = errD_real + errD_fake
        optimizerD.step()
        netG.zero_grad()
        label.fill_(1.0)
        errG = criterion(netD(fake).view(-1), label)
        errG.backward()
        optimizerG.step()
        print(f"[{i}/{args.niter}] Loss_D: {errD.item():.6f} Loss_G: {errG.item():.6f}")


if __name__ == "__main__":
    main()
