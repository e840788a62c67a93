"""The recorded program: nodes, values, storages, and what is derived from them alone."""
