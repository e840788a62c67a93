"""Planning: what a graph will need, computed without running it (lifetimes, memory, devices)."""
