"""Tracing and compiling the kernels from fake tensors."""
