"""Charts the road from a cell to its memory, before anything runs."""
