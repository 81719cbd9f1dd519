"""What is compiled for mixed batches, whose requests have few or many query rows: one kernel of several phases."""

from __future__ import annotations

from dataclasses import dataclass

from .decode import SMEM_BYTES, KernelSpec
from .limits import supports
from .problem import ElementType
from .tiling import Arch, Target

BETWEEN_BYTES = 2048  # shared memory that the last phase leaves for all mbarriers: enough unless there are very many stages
ALIGNMENT = 128
WARP_REGISTERS = 2048  # of an SM, for each of a warp's lanes


@dataclass(frozen=True, kw_only=True)
class MixedSpec:
    """A kernel whose CTAs first attend to requests of few query rows, then to requests of more (device/kernels/mixed.py).

    few, some, many: the phases in order, each with its own `q_lens`, tiles and schedule; `some` may be None. All phases use the
    same warps and the same shared memory, one phase after the other.
    """

    few: KernelSpec
    some: KernelSpec | None
    many: KernelSpec

    @property
    def phases(self) -> tuple[KernelSpec, ...]:
        """The phases that are not None, in order."""
        return tuple(phase for phase in (self.few, self.some, self.many) if phase is not None)

    @property
    def arch(self) -> Arch:
        """The mainloops' architecture."""
        return self.many.arch

    @property
    def dealt(self) -> bool:
        """Whether blocks of long queries are dealt to the CTAs."""
        return self.many.dealt

    @property
    def takes_workspace(self) -> bool:
        """Whether CTAs cut rows, or count the items that they have claimed."""
        return self.many.claims or any(phase.split for phase in self.phases)

    @property
    def head_dim(self) -> int:
        """head_dim of q and K."""
        return self.many.head_dim

    @property
    def element_type(self) -> ElementType:
        """The type of q and out."""
        return self.many.element_type

    @property
    def target(self) -> Target:
        """The target that all phases are compiled for."""
        return self.many.target

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        return max(phase.warps for phase in self.phases)

    @property
    def busy_warps(self) -> frozenset[int]:
        """The warps that any phase has work for."""
        return frozenset[int]().union(*(phase.busy_warps for phase in self.phases))

    @property
    def lookout(self) -> int:
        """The warp that looks which phases have a request: one without work in any phase, else the last, idle in the first."""
        return next((warp for warp in range(self.warps) if warp not in self.busy_warps), self.warps - 1)

    @property
    def register_shares(self) -> tuple[int, int] | None:
        """register_shares of the last phase, kept in all phases: with even shares the first phases spill (read from SASS)."""
        return self.many.register_shares

    @property
    def union_bytes(self) -> int:
        """Shared memory that the phases use one after the other."""
        most = max(phase.smem_bytes for phase in self.phases)
        return -(-most // ALIGNMENT) * ALIGNMENT

    @property
    def between_bytes(self) -> int:
        """Shared memory after union_bytes: the mbarriers of all phases, and a word per phase: whether it has a request."""
        needed = 8 * sum(phase.barrier_count for phase in self.phases) + 4 * len(self.phases)
        return -(-needed // ALIGNMENT) * ALIGNMENT

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA in bytes."""
        return self.union_bytes + self.between_bytes


def mixed_supports(spec: MixedSpec) -> list[str]:
    """Every reason why `spec` cannot be built; an empty list means that it can."""
    reasons = [reason for phase in spec.phases for reason in supports(phase)]
    if any(phase.q_lens is None for phase in spec.phases):
        reasons.append("a phase of a mixed kernel needs the query rows that it serves, q_lens")
    if any(phase.many_blocks for phase in spec.phases[:-1]):
        reasons.append("many_blocks: only the last phase may take several blocks of a request's query rows")
    if spec.smem_bytes > SMEM_BYTES[spec.target]:
        reasons.append(f"shared memory {spec.smem_bytes} bytes exceeds {SMEM_BYTES[spec.target]} on {spec.target}")
    attending, others = spec.register_shares or (0, 0)
    needed = attending * spec.many.num_warps + others * (spec.warps - spec.many.num_warps)
    if needed > WARP_REGISTERS:
        reasons.append(f"num_warps: {needed} registers a lane of {spec.warps} warps exceed {WARP_REGISTERS}")
    if spec.few.warps >= spec.warps:
        reasons.append(f"num_warps={spec.few.num_warps} of the first phase leave no warp that looks for the others' requests")
    return reasons
