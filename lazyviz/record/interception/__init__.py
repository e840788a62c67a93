"""Interception of accesses that bypass the dispatcher: reads, writes, exports, flags."""
