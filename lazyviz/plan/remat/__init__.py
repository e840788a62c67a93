"""Rematerialization: which activations are dropped and recomputed."""
