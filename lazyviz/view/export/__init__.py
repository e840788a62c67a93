"""Exports: saved pages, and projections in other tools' formats."""
