"""What a graph will need, worked out without running it: lifetimes, memory, devices."""
