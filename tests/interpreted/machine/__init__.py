"""An interpreter of PTX: it runs a compiled kernel's code on the CPU, with a numpy array of 32 lanes per register.

`launch` compiles a kernel without a GPU, parses its PTX (`ptx`) and lays out the parameters as the DSL does; `program` turns
instructions into Python functions, by the tables of `arithmetic`, `movement` and `together`; `grid` runs the warps of all CTAs by
turns in a random order, which the seed gives, and finds deadlocks; `warp` lets lanes part and meet; `memory` knows which bytes a
kernel may touch. Shared memory begins as NaN. The seed decides whether asynchronous copies land at once or as late as they may.
`attention`, `gradients` and `others` launch the kernels of an operation.

The interpreter does not show register use, speed, other proxies of memory (a missing fence.proxy), weakly ordered stores (all
warps see a store at once), accumulators that are read before the wait for their wgmma (only its operands in shared memory are
watched until then), or the effects of another launch meanwhile. Approximate functions are computed more exactly than on
a GPU; matrices multiply in f32. An instruction that no kernel has had so far raises NotImplementedError, which names it.
"""
