"""The xla backend: segments compiled by XLA through JAX."""
