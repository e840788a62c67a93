"""Simulated CUDA caching allocator, with its options and initial state."""
