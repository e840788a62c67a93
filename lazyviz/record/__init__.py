"""Recording: every ATen op becomes a node of a graph instead of running."""
