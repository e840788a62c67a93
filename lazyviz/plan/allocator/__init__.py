"""CUDA caching allocator: simulated, with its options and initial state."""
