"""Where PyTorch computes in another way under a dispatch mode: recorded as eager mode computes it."""
