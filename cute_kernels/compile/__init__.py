"""Compiled kernels: in memory and on disk, one per spec."""
