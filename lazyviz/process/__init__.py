"""The state of this Python process that lazyviz changes or reads: signals, transactions, tracebacks,
collector.
"""
