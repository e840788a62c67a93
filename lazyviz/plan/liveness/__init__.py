"""Liveness: when each storage exists, and which are alive at a given time."""
