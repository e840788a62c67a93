"""Every private PyTorch API that lazyviz relies on, each with the reason for it, and the native modules."""
