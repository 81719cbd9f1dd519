"""An interpreter of PTX: it runs a compiled kernel's code on the CPU, a numpy array of 32 lanes a register.

`launch` compiles a kernel without a GPU, parses its PTX (`ptx`) and lays out the parameters as the DSL does; `program` turns
instructions into Python functions, by the tables of `arithmetic`, `movement` and `together`; `grid` runs the warps of all CTAs by
turns in a random order, which the seed gives, and finds deadlocks; `warp` has the lanes that part and meet, `memory` knows which
bytes a kernel may touch. Shared memory begins as NaN. Asynchronous copies land at once, or as late as they may, by the seed.
`attention`, `gradients` and `others` launch the kernels of an operation.

What it does not show: registers, speed, other proxies of memory (a missing fence.proxy), weakly ordered stores (all see one
at once), and what another launch does meanwhile. Approximate functions are computed more exactly than on a GPU, matrices
multiply in f32. An instruction that no kernel has had so far raises NotImplementedError and names itself.
"""
