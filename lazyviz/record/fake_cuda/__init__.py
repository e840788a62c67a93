"""Fake CUDA: recording a cell for a CUDA device that is absent."""
