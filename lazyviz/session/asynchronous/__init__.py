"""Asynchronous evaluation: run handles, and loops whose steps run while the next one is recorded."""
