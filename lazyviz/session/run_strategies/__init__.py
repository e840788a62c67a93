"""Run strategies: eager, replay, compiled, micro-batched, distributed, rematerialized; one module each."""
