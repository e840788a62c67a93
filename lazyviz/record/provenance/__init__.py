"""Provenance of ops: source line, notebook cell, module, phase, variable names."""
