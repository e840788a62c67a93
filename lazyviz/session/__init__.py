"""The public LazyGraph, blocks, and runs: where recording, planning, execution and pictures come together."""
