"""Comparisons: two plans side by side."""
