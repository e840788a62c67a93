"""The CUDA Graphs backend: a segment that comes again is launched as a whole."""
