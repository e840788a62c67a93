"""Private PyTorch APIs that lazyviz relies on, each with its reason, and the native modules."""
