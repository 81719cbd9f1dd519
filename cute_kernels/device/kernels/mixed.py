"""The kernel of mixed batches: a CTA attends to requests with few query rows, then to requests with more, phase by phase.

A phase is the kernel that would serve its requests alone (those whose number of query rows is within KernelSpec.q_lens): the same
body, schedule, mainloop and combine, in warps and shared memory that all phases use. A warp that the first phase leaves idle
meanwhile makes the mbarriers of the other phases, looks which of them have a request, and reports bad metadata of every request,
also of one that no phase serves. So a batch of decode rows pays one barrier per further phase, and no launch.
"""

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from ...config.decode import LINE_BYTES, LOG2_E
from ...config.mixed import MixedSpec
from ..attend.query_rows import served
from ..combine.partials import state_bytes, workspace_from
from ..kv.source import Rows, inspect_requests
from ..mainloop.arena import Arena, arena_of
from ..mainloop.shared import allocate
from ..problem import Problem
from ..ptx.barriers import ATTENDING, BETWEEN, sync_branches
from ..ptx.registers import LANES
from ..ptx.warps import warp_number
from ..schedule.dealing import claims_of
from .attention import AttentionKernel
from .long_queries import LongQueryKernel


@dataclass(frozen=True)
class Mainloops:
    """The mainloops of all phases."""

    phases: tuple

    def operands(self, k: cute.Tensor, v: cute.Tensor) -> tuple:
        """The caches as each phase's mainloop takes them."""
        return tuple(phase.mainloop.operands(k, v) for phase in self.phases)


class MixedKernel(AttentionKernel):
    """Launches attention for one mixed spec."""

    def __init__(self, spec: MixedSpec):
        self.spec = spec
        self.phases = tuple((LongQueryKernel if phase.dealt else AttentionKernel)(phase) for phase in spec.phases)
        self.mainloop = Mainloops(self.phases)

    def launch(self, q, k, caches, scales, tables, out, lse, workspace, softmax_scale, num_ctas, status, further, stream):
        """Starts the grid."""
        self.attend(q, k, caches, scales, tables, out, lse, workspace, softmax_scale * LOG2_E, status, further).launch(
            grid=(num_ctas, 1, 1),
            block=(LANES * self.spec.warps, 1, 1),
            smem=self.spec.smem_bytes,
            min_blocks_per_mp=1,
            preferred_smem_carveout=100,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def attend(
        self, q, k, caches: tuple, scales: tuple, tables: tuple, out, lse, workspace, scale_log2: Float32, status: Int64, further
    ):
        """The work of one CTA: each phase that has a request, one after the other."""
        spec, smem = self.spec, cutlass.memory.SmemAllocator()
        base = arena_of(smem, spec.union_bytes)
        present = smem.allocate_tensor(Int32, cute.make_layout(len(self.phases)), byte_alignment=8)
        shared = tuple(
            allocate(phase.spec, Arena(base, spec.union_bytes, smem.allocate_array(Int64, phase.spec.barrier_count)))
            for phase in self.phases
        )
        queries, scores = self.phases[0].name_further(q, further)
        rows, problems = Rows(tables, k, queries), []
        begin = Int64(LINE_BYTES if spec.many.claims else 0)
        for phase, brought in zip(self.phases, caches, strict=True):
            own = claims = None
            if cutlass.const_expr(phase.spec.claims):
                claims = claims_of(workspace)
            if cutlass.const_expr(phase.spec.split):
                own = workspace_from(workspace, begin)
                begin += state_bytes(phase.spec)
            problems.append(Problem(q, brought, scales, rows, out, lse, own, scale_log2, status, scores, claims))
        cute.arch.griddepcontrol_launch_dependents()
        warp, shares = cute.arch.make_warp_uniform(warp_number()), cutlass.const_expr(spec.register_shares)
        busy = (Int32(sum(1 << warp for warp in spec.busy_warps)) >> warp) & 1 != 0
        if warp == spec.lookout:
            self.prepare_phases(caches, shared)
            self.look_for_phases(rows, present, status)
        if cutlass.const_expr(shares is None):
            if busy:
                self.attend_phases(tuple(problems), shared, present, (0, spec.warps))
        elif warp < spec.many.num_warps:
            cute.arch.setmaxregister_increase(shares[0])
            self.attend_phases(tuple(problems), shared, present, (0, spec.many.num_warps))
        else:
            cute.arch.setmaxregister_decrease(shares[1])
            if busy:
                self.attend_phases(tuple(problems), shared, present, (spec.many.num_warps, spec.warps))

    @cute.jit
    def attend_phases(self, problems: tuple, shared: tuple, present: cute.Tensor, warps: cutlass.Constexpr):
        """Runs every phase in the busy warps of a range. present: from look_for_phases, for all phases but the first.

        All busy warps meet between two phases, then the attending warps meet once more, at an aligned barrier: after a barrier
        that is not aligned, ptxas keeps no warp value in a uniform register, and the loop over 8-bit tiles has 618 instructions
        instead of 560 (read from SASS). The first barrier cannot be aligned: synccheck demands that all warps at an aligned
        barrier come from one instruction.
        """
        meeting = self.spec.busy_warps | {self.spec.lookout}
        for number in cutlass.range_constexpr(len(self.phases)):
            phase, wanted = self.phases[number], Boolean(True)
            if cutlass.const_expr(number > 0):
                cute.arch.fence_proxy("async.shared", space="cta")
                sync_branches(BETWEEN, len(meeting))
                meeting = self.spec.busy_warps
                if cutlass.const_expr(warps[0] == 0):
                    cute.arch.barrier(barrier_id=ATTENDING, number_of_threads=LANES * len(meeting & set(range(warps[1]))))
                wanted = cute.arch.make_warp_uniform(present[number]) != 0
            registers = None if self.spec.register_shares else phase.spec.register_shares
            if cutlass.const_expr(warps[0] < phase.spec.warps):
                phase.attend_phase(problems[number], shared[number], wanted, registers, warps)

    @cute.jit
    def prepare_phases(self, caches: tuple, shared: tuple):
        """A warp makes the mbarriers of all phases but the first."""
        for phase, brought, own in zip(self.phases[1:], caches[1:], shared[1:], strict=True):
            phase.mainloop.prepare(brought, own)

    @cute.jit
    def look_for_phases(self, rows: Rows, present: cute.Tensor, status: Int64):
        """A warp finds out which of the later phases have a request, then reports bad metadata of all requests."""
        batch = Int32(rows.queries.indptr.shape[0]) - 1
        cute.arch.griddepcontrol_wait()
        for number in cutlass.range_constexpr(1, len(self.phases)):
            found = Boolean(False)
            for row in cutlass.range(cute.arch.lane_idx(), batch, LANES, unroll=1):
                found = found | served(self.phases[number].spec, rows.queries, row)
            some = cute.arch.vote_any_sync(found)
            with cute.arch.elect_one():
                present[number] = Int32(some)
        if cutlass.const_expr(self.spec.lookout not in self.spec.busy_warps):
            cute.arch.sync_warp()
            cute.arch.barrier_arrive(barrier_id=BETWEEN, number_of_threads=LANES * (len(self.spec.busy_warps) + 1))
        inspect_requests(self.phases[-1].spec, rows, batch, status)
        cute.arch.sync_warp()  # the lanes take different branches in inspect_requests
