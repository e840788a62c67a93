"""Devices to plan for: those of this machine, and known cards that are absent."""
