"""`python -m cute_kernels`."""

from .cli import main

main()
