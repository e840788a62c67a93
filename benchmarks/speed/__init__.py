"""What ``benchmarks/run.py`` measures: each part a module, each module one subject."""
