"""Workspaces: the scratch memory that a kernel takes and gives back while it runs."""
