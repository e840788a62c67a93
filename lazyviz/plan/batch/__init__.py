"""Batch analysis: the batch dimension of every value, and splitting a run into micro-batches."""
