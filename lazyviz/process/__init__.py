"""Process state that lazyviz changes or reads: signals, transactions, tracebacks, garbage collector."""
