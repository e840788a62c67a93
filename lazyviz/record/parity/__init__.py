"""Parity with eager mode: corrections where PyTorch computes differently under a dispatch mode."""
