"""Execution of pending nodes: backends, progress, reports, and memory freed at last use."""
