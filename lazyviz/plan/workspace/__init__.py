"""Workspaces: scratch memory that a kernel allocates and frees while it runs."""
