"""What kernels are compiled for: the knobs, the compile keys, and the limits of each operation."""
