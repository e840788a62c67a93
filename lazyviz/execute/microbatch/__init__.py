"""Micro-batched runs: in this process, or on the workers of a cluster."""
