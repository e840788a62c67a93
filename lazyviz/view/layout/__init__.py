"""Where everything is drawn: a layered layout of nested boxes."""
