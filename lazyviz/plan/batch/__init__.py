"""Batch analysis: where the batch lies in every value, and how a run is split into micro-batches."""
