"""Remedies: changes that would lower the peak, and by how much."""
