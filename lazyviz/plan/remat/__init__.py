"""Rematerialization: which activations are dropped and computed again."""
