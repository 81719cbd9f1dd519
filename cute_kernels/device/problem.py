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

    With several query rows per request: q, out [batch, q_len, num_heads, head_dim], or ragged [total_q, num_heads, head_dim];
    lse: without the last axis. scales: K's and V's, or None (kv/scale.py). rows: which keys and query rows a request has.
    workspace: its bytes, or None if no row is cut. scale_log2: the softmax scale, to base 2. status: the address at which faults
    are reported. scores: see ScoreOperands. claims: Int32 [1], how many items are claimed, if CTAs claim them
    (schedule/dealing.py).
    """

    q: cute.Tensor
    caches: tuple
    scales: tuple
    rows: Rows
    out: cute.Tensor
    lse: cute.Tensor
    workspace: cute.Tensor | None
    scale_log2: Float32
    status: Int64
    scores: "ScoreOperands | None" = None
    claims: cute.Tensor | None = None

    def batch(self, spec: KernelSpec) -> Int32:
        """The number of requests."""
        if spec.one_request:
            return Int32(1)
        return Int32(self.rows.queries.indptr.shape[0]) - 1 if spec.query == "ragged" else Int32(self.q.shape[0])


@dataclass(frozen=True)
class ScoreOperands:
    """The operands of masks and functions of a score; None for a tensor that the spec does not use.

    tree_mask: int32 words [total_q, words], or [batch, q_len, words]; slopes, sinks: f32 [num_heads]; softcap: the cap.
    """

    tree_mask: cute.Tensor | None
    slopes: cute.Tensor | None
    sinks: cute.Tensor | None
    softcap: Float32


@dataclass(frozen=True)
class Gradients:
    """The tensors of a backward launch. q, dout, out, lse, delta: as AttentionKernel's q, out and lse; k, v: as its caches.

    ranges: per request and KV head, the exponent field of the largest score gradient (gradient_range.py), or None. rows, scores:
    as in Problem. scale: softmax_scale. status: address of the plan's status words.
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
        """The factor that makes a product of q and k a logit to base 2."""
        return self.scale * LOG2_E

    def batch(self, spec: BackwardSpec) -> Int32:
        """The number of requests."""
        return Int32(self.rows.queries.indptr.shape[0]) - 1 if spec.query == "ragged" else Int32(self.q.shape[0])
