"""Projected run time: the work of every op, and the seconds that a device would take for it."""
