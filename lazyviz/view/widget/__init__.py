"""The widget, Python's side: what the page asks, and the answers."""
