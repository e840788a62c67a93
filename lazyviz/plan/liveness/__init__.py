"""Liveness: when each storage exists, and what is live at a moment."""
