"""The records as one self-contained HTML page: `python -m cute_kernels dashboard`."""
