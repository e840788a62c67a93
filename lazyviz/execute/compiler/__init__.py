"""Compiling backends: common parts, and the Inductor backend."""
