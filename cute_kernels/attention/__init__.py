"""Decode attention: descriptors, checks, the plan, its shortcut, and the semantics in PyTorch."""
