"""Attends to one tile: scores, softmax, and a KV split's state."""
