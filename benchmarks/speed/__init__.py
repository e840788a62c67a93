"""The parts of ``benchmarks/run.py``, one module per subject."""
