"""Advice: comparison of training strategies on several GPUs, by recording each."""
