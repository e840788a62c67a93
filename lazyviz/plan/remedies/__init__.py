"""Remedies: changes that would lower the peak, and how much they save."""
