"""Widget, Python side: requests of the page, and responses."""
