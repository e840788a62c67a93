"""Shape inference: the result of an op from the metadata of its arguments."""
