"""Devices to plan for: those of this machine, and known GPUs that are absent."""
