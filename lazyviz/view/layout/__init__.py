"""Layout: a layered layout of nested boxes."""
