"""Tests by operation: each folder holds those of the CPU and those of a GPU. `tests.support` is what they share."""
