"""The tensors of a launch."""

from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from ..config.backward import BackwardSpec
from ..config.decode import LOG2_E, KernelSpec
from .kv.source import Rows


@dataclass(frozen=True)
class Problem:
    """q, out [batch, num_heads, head_dim]; lse [batch, num_heads]; the caches as the mainloop takes them.

    Of several query rows: q, out [batch, q_len, num_heads, head_dim], or ragged [total_q, num_heads, head_dim]; lse without the
    last axis. scales: K's and V's, or None (kv/scale.py). rows: what says which keys and query rows a request has. workspace: its
    bytes, or None where rows stay whole. status: the address at which faults are reported. scores: what changes them.
    """

    q: cute.Tensor
    caches: tuple
    scales: tuple
    rows: Rows
    out: cute.Tensor
    lse: cute.Tensor
    workspace: cute.Tensor | None
    status: Int64
    scores: "ScoreOperands | None" = None

    def batch(self, spec: KernelSpec) -> Int32:
        """Requests."""
        return Int32(self.rows.queries.indptr.shape[0]) - 1 if spec.query == "ragged" else Int32(self.q.shape[0])


@dataclass(frozen=True)
class ScoreOperands:
    """What masks and functions of a score are given, None where there is none.

    tree_mask: int32 words [total_q, words], or [batch, q_len, words]; slopes, sinks: f32 [num_heads]; softcap: the cap.
    """

    tree_mask: cute.Tensor | None
    slopes: cute.Tensor | None
    sinks: cute.Tensor | None
    softcap: Float32


@dataclass(frozen=True)
class Gradients:
    """The tensors of a launch. q, dout, out, dq, lse, delta: as DecodeKernel's q, out and lse; k, v, dk, dv: as its caches.

    ranges: of a request and KV head the largest gradient of a score (gradient_range.py), or None. rows: of each request; scores:
    what changes them. status: address of the plan's status words.
    """

    q: cute.Tensor
    dout: cute.Tensor
    out: cute.Tensor
    lse: cute.Tensor
    delta: cute.Tensor
    ranges: cute.Tensor | None
    k: cute.Tensor
    v: cute.Tensor
    rows: Rows
    scores: ScoreOperands
    scale: Float32
    status: Int64

    @property
    def scale_log2(self) -> Float32:
        """What makes a product a logit to base 2."""
        return self.scale * LOG2_E

    def batch(self, spec: BackwardSpec) -> Int32:
        """Requests."""
        return Int32(self.rows.queries.indptr.shape[0]) - 1 if spec.query == "ragged" else Int32(self.q.shape[0])
