"""A small language model that decodes through the package's plans: `python -m cute_kernels demo`."""
