"""What reaches tensors past the dispatcher: reads, writes, exports, flags, and the patches that see them."""
