"""The tensors of a launch."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Int64


@dataclass(frozen=True)
class Problem:
    """q, out [batch, num_heads, head_dim]; lse [batch, num_heads]; the caches as the mainloop takes them.

    k [pages, num_kv_heads, page_size, head_dim] gives extents only. scales: K's and V's, or None (kv/scale.py). tables: the page
    table's tensors. workspace: its bytes, or None where rows stay whole. status: the address at which faults are reported.
    """

    q: cute.Tensor
    k: cute.Tensor
    caches: tuple
    scales: tuple
    tables: tuple
    out: cute.Tensor
    lse: cute.Tensor
    workspace: cute.Tensor | None
    status: Int64
