"""CUDA Graphs backend: repeated segments are captured and launched as a whole."""
