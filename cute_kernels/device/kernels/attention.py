"""The attention kernel: the decode kernel with several query rows per request, masks, and functions of a score."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ..attend.query_rows import Queries
from ..mainloop.shared import Shared
from ..problem import Problem, ScoreOperands
from ..ptx.warps import numbered_anew, warp_number
from .decode import DecodeKernel


class AttentionKernel(DecodeKernel):
    """Launches attention for one kernel spec that is not plain."""

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor, k: cute.Tensor, v: cute.Tensor,
        table0: cute.Tensor | None, table1: cute.Tensor | None, table2: cute.Tensor | None,
        k_scale: cute.Tensor | None, v_scale: cute.Tensor | None,
        out: cute.Tensor, lse: cute.Tensor, workspace: cute.Tensor | None,
        qo_indptr: cute.Tensor | None, tree_mask: cute.Tensor | None,
        alibi_slopes: cute.Tensor | None, sinks: cute.Tensor | None,
        softmax_scale: Float32, num_ctas: Int32, status: Int64,
        max_q_len: Int32, window_left: Int32, window_right: Int32, softcap: Float32,
        stream,
    ):  # fmt: skip
        """As DecodeKernel, except: q, out [batch, q_len, num_heads, head_dim], or ragged [total_q, num_heads, head_dim].

        (One query row: DecodeKernel's.) lse: the same without the last axis. k, v may be packed, [1, num_kv_heads, total_k,
        head_dim]. qo_indptr [batch + 1]; tree_mask [batch, q_len, words] or [total_q, words]; alibi_slopes, sinks f32
        [num_heads]; None if the spec does not use them.
        """
        tables = tuple(t for t in (table0, table1, table2) if t is not None)
        caches, scales = self.mainloop.operands(k, v), (k_scale, v_scale)
        further = (qo_indptr, tree_mask, alibi_slopes, sinks, max_q_len, window_left, window_right, softcap)
        self.launch(q, k, caches, scales, tables, out, lse, workspace, softmax_scale, num_ctas, status, further, stream)

    @cute.jit
    def attend_phase(
        self,
        problem: Problem,
        shared: Shared,
        wanted: Boolean,
        registers: cutlass.Constexpr,
        warps: cutlass.Constexpr,
    ):
        """Runs `divide` as a phase of a mixed kernel, if it is `wanted`; warps beyond the phase's own have nothing to do."""
        if wanted & (cute.arch.make_warp_uniform(warp_number()) < self.spec.warps):
            self.divide_anew(problem, shared, registers, (warps[0], min(warps[1], self.spec.warps)))

    def divide_anew(self, *arguments):
        """`divide` with a number of the warp that lives no longer than the phase."""
        with numbered_anew():
            self.divide(*arguments)

    def name_further(self, q, further: tuple) -> tuple:
        """(Queries, ScoreOperands) of a launch."""
        indptr, tree_mask, slopes, sinks, max_q_len, window_left, window_right, softcap = further
        extent = Int32(q.shape[1 if self.spec.query == "uniform" else 0])
        return Queries(indptr, extent, max_q_len, window_left, window_right), ScoreOperands(tree_mask, slopes, sinks, softcap)
