"""Merging states of attention over disjoint parts of the KV."""
