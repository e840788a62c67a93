"""Models for the benchmarks: real architectures at sizes that take seconds on a CPU."""
