"""XLA backend: segments compiled by XLA through JAX."""
