"""What a kernel of attention's backward is compiled for, and its limits."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .decode import SMEM_BYTES
from .problem import UNIT_BYTES, ProblemSpec
from .tiling import TILE_M, WARPGROUP, Arch, MmaScope, RingShape, Target

ROW_BYTES = 16  # bytes of a query row that one copy brings
NUM_STAGES = 2
WHOLE_HEAD_DIM = 128  # above this, dK and dV of 16 keys take more registers than a thread has: each gets its own launch
MOST_EXPONENT = 1.0  # of a softmax weight, to base 2: with the lse of the same run, only rounding can lift an exponent above 0
SHAPES = ((8, 64), (8, 32), (4, 64), (4, 32), (4, 16))  # (warps, streamed rows) of a CTA; the first that fits is taken
SHAPES_OF_F32 = ((8, 16), (4, 16), (2, 16), (1, 16))  # the same for f32, which takes twice the memory, and parts in registers
CHAIN_THREADS = 1024  # of the CTA that chains the uses of shared pages
CHAIN_WORDS = 3, 2  # int32 words per page, and per entry of the page table (device/kv/chains.py)
SINK_WARPS = 8  # of a CTA that sums the gradient of one head's sink
WORDS_BYTES = 1024  # shared memory of a CTA in addition to its tiles and their rows' numbers, alignment included
WIDE_COLUMNS = 32  # a head's columns are a multiple of this for wgmma


@dataclass(frozen=True, kw_only=True)
class BackwardSpec(ProblemSpec):
    """Everything that changes the generated code of the backward's kernels. Hashable; the compile cache's key.

    num_warps: warps of a CTA, each with an m-tile of 16 resident rows: keys, or packed query rows. tile_rows: rows of a tile
    that streams past the resident rows. shared_pages: whether two requests may read one page, whose gradients are then summed.
    mma: who issues the tensor-core steps.
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
        """Rows of K and V, or of q and dout, that stay in shared memory while rows of the other two tensors stream."""
        return TILE_M * self.num_warps

    @property
    def resident(self) -> RingShape:
        """The shape of a resident tile."""
        return RingShape(self.resident_rows, self.resident_rows, self.row_units, 1)

    @property
    def streamed(self) -> RingShape:
        """The ring of streamed tiles."""
        return RingShape(self.tile_rows, self.tile_rows, self.row_units, self.num_stages)

    @property
    def row_units(self) -> int:
        """16-bit units of a row of a tile."""
        return self.padded_head_dim * self.q_bytes // UNIT_BYTES

    @property
    def vector(self) -> int:
        """Elements of a query row that one copy brings."""
        return ROW_BYTES // self.q_bytes

    @property
    def value_columns(self) -> int:
        """Neighbouring columns of a row, each in an n8 step of its own, that a lane loads at once (epilogue.value_column)."""
        return self.streamed.lane_columns if self.splits else 1

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
        """For each launch over the keys: (whether it computes dK, whether it computes dV)."""
        return ((True, True),) if self.padded_head_dim <= WHOLE_HEAD_DIM else ((True, False), (False, True))

    @property
    def smem_bytes(self) -> int:
        """Bytes of a CTA's shared memory: two resident tiles, two rings, lse and delta of their rows, a word per resident row."""
        rows = self.num_stages * self.tile_rows * 2 * 4 + self.resident_rows * 4
        return 2 * (self.resident.tile_bytes + self.num_stages * self.streamed.tile_bytes) + rows + 2 * WORDS_BYTES


def fitted(spec: BackwardSpec) -> BackwardSpec:
    """`spec` with the first of its type's shapes that fits in shared memory, or with the last if none does."""
    for num_warps, tile_rows in SHAPES_OF_F32 if spec.splits else SHAPES:
        spec = replace(spec, num_warps=num_warps, tile_rows=tile_rows)
        if spec.smem_bytes <= SMEM_BYTES[spec.target if spec.arch == "sm90" else "sm_80"]:
            break
    return spec


def backward_supports(spec: BackwardSpec) -> list[str]:
    """Every reason why `spec` cannot be built; an empty list means that it can."""
    reasons = []
    if not spec.vector <= spec.head_dim <= 256 or spec.head_dim % spec.vector:
        reasons.append(f"head_dim={spec.head_dim} is not a multiple of {spec.vector} in {spec.vector}..256")
    if spec.vector_bytes not in (4, 8, 16):
        reasons.append(f"vector_bytes={spec.vector_bytes} is not 4, 8 or 16: what one copy of a cache moves")
    if spec.tile_rows % TILE_M or spec.num_warps < 1:
        reasons.append(f"tile_rows={spec.tile_rows} is not a multiple of {TILE_M}, or num_warps={spec.num_warps} below 1")
    if spec.by_warpgroup and spec.splits:
        reasons.append("mma=warpgroup: f32 is multiplied by warps, from parts in registers")
    if spec.by_warpgroup and (spec.target != "sm_90a" or spec.num_warps % WARPGROUP or spec.padded_head_dim % WIDE_COLUMNS):
        reasons.append(f"mma=warpgroup needs sm_90a, warpgroups, and columns in multiples of {WIDE_COLUMNS}")
    if spec.modifiers.tree_mask:
        reasons.append("tree_mask has no backward")
    if spec.query == "one":
        reasons.append('query="one" is taken as uniform')
    if spec.smem_bytes > SMEM_BYTES[spec.target]:
        reasons.append(f"shared memory {spec.smem_bytes} bytes exceeds {SMEM_BYTES[spec.target]} on {spec.target}")
    return reasons
