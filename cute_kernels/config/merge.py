"""What a merge of attention states is compiled for, and the limits of that kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .problem import LseBase
from .tiling import Target

StateType = Literal["f32", "f16", "bf16"]

MAX_COLUMNS = 2  # neighbouring columns that a thread merges
MAX_IN_FLIGHT = 8  # states whose loads a thread issues together
MAX_WARPS = 4  # of a CTA
MAX_CTAS_PER_ROW = 65_535  # they are the grid's second axis


@dataclass(frozen=True)
class MergeSpec:
    """Everything that changes the generated code of a merge. Hashable; the compile cache's key.

    element_type: of the states' outputs. columns: neighbouring columns that a thread merges and one load brings, 1 or 2.
    in_flight: states whose loads a thread issues together; chunked: whether there are more states. num_warps: warps of a CTA.
    sinks: whether one logit per head joins the state. The number of states within these limits, the batch, the heads and every
    stride but the last are dynamic.
    """

    target: Target
    element_type: StateType
    head_dim: int
    columns: int
    in_flight: int
    chunked: bool
    num_warps: int
    lse_base: LseBase
    sinks: bool = False

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return self.num_warps * 32

    @property
    def per_head(self) -> int:
        """Threads that merge one head of a row."""
        return self.head_dim // self.columns

    def ctas_per_row(self, num_heads: int) -> int:
        """CTAs that merge one row of the batch."""
        return -(-num_heads * self.per_head // self.threads)


def merge_spec(
    target: Target,
    element_type: StateType,
    columns: int,
    num_states: int,
    num_heads: int,
    head_dim: int,
    lse_base: LseBase,
    sinks: bool = False,
) -> MergeSpec:
    """The spec for a problem: loads in flight for its states, warps for the work of one row, each a power of two.

    There are at least two loads: registers for one word have no stride by which its two columns could be told apart.
    """
    warps = -(-num_heads * head_dim // columns // 32)
    return MergeSpec(
        target=target,
        element_type=element_type,
        head_dim=head_dim,
        columns=columns,
        in_flight=min(MAX_IN_FLIGHT, max(2, _power_of_two(num_states))),
        chunked=num_states > MAX_IN_FLIGHT,
        num_warps=min(MAX_WARPS, _power_of_two(warps)),
        lse_base=lse_base,
        sinks=sinks,
    )


def merge_supports(spec: MergeSpec) -> list[str]:
    """Every reason why `spec` cannot be built; an empty list means that it can."""
    reasons = []
    if not 1 <= spec.columns <= MAX_COLUMNS or spec.head_dim < 1 or spec.head_dim % spec.columns:
        reasons.append(f"head_dim={spec.head_dim} is not a positive multiple of columns={spec.columns}, 1 or {MAX_COLUMNS}")
    if not 1 <= spec.in_flight <= MAX_IN_FLIGHT:
        reasons.append(f"in_flight={spec.in_flight} is outside 1..{MAX_IN_FLIGHT}: more loads need more registers")
    if not 1 <= spec.num_warps <= MAX_WARPS:
        reasons.append(f"num_warps={spec.num_warps} is outside 1..{MAX_WARPS}")
    return reasons


def _power_of_two(least: int) -> int:
    """The smallest power of two that is at least `least`."""
    return 1 << (least - 1).bit_length()
