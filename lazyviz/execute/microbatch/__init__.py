"""Runs in micro-batches: here, or on the workers of a cluster."""
