"""The batch: where it lies in every value, and how a run is cut into micro-batches."""
