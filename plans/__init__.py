"""Tuned plans: one JSON file a GPU, installed as cute_kernels.plans."""
