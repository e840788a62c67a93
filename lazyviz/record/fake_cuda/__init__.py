"""A CUDA device that is not there: what a cell recorded for it sees."""
