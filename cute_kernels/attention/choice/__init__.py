"""Which configuration serves a decode problem: the cost model, the tuned table, and the tuner's decisions."""
