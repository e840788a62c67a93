"""The CUDA caching allocator: simulated, with its options and where it would start."""
