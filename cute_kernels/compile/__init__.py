"""Compiled kernels: in memory, one per spec."""
