"""What a kernel of attention's backward is compiled for, and its limits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .decode import SMEM_BYTES
from .problem import UNIT_BYTES, ProblemSpec
from .tiling import TILE_M, WARPGROUP, Arch, MmaScope, RingShape, Target

ROW_BYTES = 16  # of a query row that one copy brings
NUM_STAGES = 2
WHOLE_HEAD_DIM = 128  # above, dK and dV of 16 keys take more registers than a thread has: a pass for each
MOST_EXPONENT = 1.0  # of a softmax weight, to base 2: the lse of the same run leaves none above 0 but by its rounding
SHAPES = ((8, 64), (8, 32), (4, 64), (4, 32), (4, 16))  # warps and streamed rows of a CTA, the first that fits is taken
CHAIN_THREADS = 1024  # of the CTA that chains the uses of shared pages
CHAIN_WORDS = 3, 2  # int32 of a page, and of an entry of its table (device/kv/chains.py)
SINK_WARPS = 8  # of a CTA that sums a head's gradient of its sink
WORDS_BYTES = 1024  # shared memory of a CTA beside its tiles and their rows' numbers, alignment included
WIDE_COLUMNS = 32  # that heads of wgmma are multiples of


@dataclass(frozen=True, kw_only=True)
class BackwardSpec(ProblemSpec):
    """Everything that changes the generated code of the backward's kernels. Hashable; the compile cache's key.

    num_warps: of a CTA, which has as many m-tiles of 16 resident rows: keys, or packed query rows. tile_rows: rows of the
    tiles that stream past them. shared_pages: whether two requests may read one page, whose gradients then sum. mma: who issues
    the tensor-core steps.
    """

    arch: Arch
    target: Target
    num_warps: int
    tile_rows: int
    num_stages: int
    shared_pages: bool
    mma: MmaScope = "warp"

    @property
    def by_warpgroup(self) -> bool:
        """Whether warpgroups issue the tensor-core steps."""
        return self.mma == "warpgroup"

    @property
    def threads(self) -> int:
        """Threads of a CTA."""
        return 32 * self.num_warps

    @property
    def resident_rows(self) -> int:
        """Rows that stay in shared memory while others stream: of K and V, or of q and dout."""
        return TILE_M * self.num_warps

    @property
    def resident(self) -> RingShape:
        """A resident tile."""
        return RingShape(self.resident_rows, self.resident_rows, self.padded_head_dim, 1)

    @property
    def streamed(self) -> RingShape:
        """The ring of streamed tiles."""
        return RingShape(self.tile_rows, self.tile_rows, self.padded_head_dim, self.num_stages)

    @property
    def row_bytes(self) -> int:
        """Bytes of q, out and their gradients that one copy moves."""
        return ROW_BYTES

    @property
    def lifts(self) -> bool:
        """Whether gradients of scores are brought into the range of f16 (device/attend/gradient_range.py)."""
        return self.element_type == "f16"

    @property
    def passes(self) -> tuple[tuple[bool, bool], ...]:
        """Of each launch over the keys, whether it makes dK, and dV."""
        return ((True, True),) if self.padded_head_dim <= WHOLE_HEAD_DIM else ((True, False), (False, True))

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA: two resident tiles, two rings, lse and delta of a stage's rows, a word a resident row."""
        rows = self.num_stages * self.tile_rows * 2 * 4 + self.resident_rows * 4
        return 2 * (self.resident.tile_bytes + self.num_stages * self.streamed.tile_bytes) + rows + 2 * WORDS_BYTES


def fitted(spec: BackwardSpec) -> BackwardSpec:
    """`spec` with the first of SHAPES that its shared memory holds; the last where none does."""
    for num_warps, tile_rows in SHAPES:
        spec = replace(spec, num_warps=num_warps, tile_rows=tile_rows)
        if spec.smem_bytes <= SMEM_BYTES[spec.target if spec.arch == "sm90" else "sm_80"]:
            break
    return spec


def backward_supports(spec: BackwardSpec) -> list[str]:
    """Every reason why `spec` cannot be built; an empty list means that it can."""
    reasons = []
    if not 8 <= spec.head_dim <= 256 or spec.head_dim % (ROW_BYTES // UNIT_BYTES):
        reasons.append(f"head_dim={spec.head_dim} is not a multiple of 8 in 8..256")
    if spec.vector_bytes not in (4, 8, 16):
        reasons.append(f"vector_bytes={spec.vector_bytes} is not 4, 8 or 16: what one copy of a cache moves")
    if spec.tile_rows % TILE_M or spec.num_warps < 1:
        reasons.append(f"tile_rows={spec.tile_rows} is not a multiple of {TILE_M}, or num_warps={spec.num_warps} below 1")
    if spec.by_warpgroup and (spec.target != "sm_90a" or spec.num_warps % WARPGROUP or spec.padded_head_dim % WIDE_COLUMNS):
        reasons.append(f"mma=warpgroup needs sm_90a, warpgroups, and columns in multiples of {WIDE_COLUMNS}")
    if spec.modifiers.tree_mask:
        reasons.append("tree_mask has no backward")
    if spec.query == "one":
        reasons.append('query="one" is taken as uniform')
    if spec.smem_bytes > SMEM_BYTES[spec.target]:
        reasons.append(f"shared memory {spec.smem_bytes} bytes exceeds {SMEM_BYTES[spec.target]} on {spec.target}")
    return reasons
