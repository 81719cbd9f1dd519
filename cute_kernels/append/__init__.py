"""Appending K and V to a paged cache: descriptor, checks, plan, and the semantics in PyTorch."""
