"""Shape inference: what an op returns, from its arguments' metadata alone."""
