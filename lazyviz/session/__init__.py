"""Session: the public LazyGraph, blocks, and runs, which compose all other packages."""
