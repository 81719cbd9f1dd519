"""The kernels: composition only."""
