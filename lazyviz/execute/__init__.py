"""Execution: backends, the progress of a run, freeing at last use."""
