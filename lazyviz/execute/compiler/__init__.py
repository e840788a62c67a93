"""Compiling backends: what they share, and the Inductor backend."""
