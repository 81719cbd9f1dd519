"""What an append to a paged KV cache is compiled for, and the limits of that kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from .problem import ElementType, ScaleForm, StoredType, TableFormat
from .tiling import Arch, Target

IndexType = Literal["i32", "i64"]

MAX_HEAD_DIM = 256
MAX_COLUMNS = 8  # neighbouring 16-bit columns that one load of 16 bytes brings
CTA_THREADS = 128
WARP = 32
FULL_GRID = 2**18  # threads that fill every SM of an H200 (132 x 2,048, nearly)
UNROLLS = (4, 2, 1)
COMPUTED_LOADS = 2  # loads of one row that a thread has in flight if a scale is computed and no SM is left idle


@dataclass(frozen=True)
class RotarySpec:
    """How a rotary embedding changes the generated code. queries: whether q is rotated in the same launch."""

    half: bool  # column i is paired with i + rotary_dim / 2; if False, 2 i is paired with 2 i + 1
    rotary_dim: int
    queries: bool
    position_type: IndexType


@dataclass(frozen=True)
class AppendSpec:
    """Everything that changes the generated code of an append. Hashable; the compile cache's key.

    arch: "sm90" converts to fp8 by instruction, "sm80" in integers, with the same bits. table_format: with "none" each token is
    given a slot, of slot_type; with "dense" and "csr" a token takes its row's last slot. element_type: the type of the incoming
    K and V. columns: neighbouring columns that one load brings, 1, 2, 4 or 8. lanes: threads of a warp that share a row, a power
    of two. unroll: rows of K, and as many of V, that a thread has in flight. nhd: whether the caches are NHD, else HND. The
    numbers of tokens, heads and pages, and every stride but the last, are dynamic.
    """

    arch: Arch
    target: Target
    element_type: ElementType
    k_type: StoredType
    v_type: StoredType
    k_scale: ScaleForm
    v_scale: ScaleForm
    head_dim: int
    page_size: int
    table_format: TableFormat
    slot_type: IndexType
    columns: int
    lanes: int
    unroll: int
    nhd: bool
    rotary: RotarySpec | None

    @property
    def computes(self) -> bool:
        """Whether a scale is computed from each row."""
        return self.k_scale.startswith("token") or self.v_scale.startswith("token")

    @property
    def pieces(self) -> int:
        """Loads that one (token, head) row takes."""
        return self.head_dim // self.columns

    @property
    def rounds(self) -> int:
        """Pieces of a row that one thread takes."""
        return -(-self.pieces // self.lanes)

    @property
    def row_groups(self) -> int:
        """Rows that the threads of a CTA take at a time."""
        return CTA_THREADS // self.lanes

    @property
    def rows_per_cta(self) -> int:
        """(token, head) rows of K and of V that one CTA appends."""
        return self.row_groups * self.unroll


def lanes_of(pieces: int) -> int:
    """Threads of a warp that share a row of `pieces` loads: one load each if a warp has as many threads."""
    return min(WARP, 1 << (pieces - 1).bit_length())


def share_rows(spec: AppendSpec, rows: int) -> AppendSpec:
    """`spec`, which has one load per lane and one row per thread, adapted to `rows` (token, head) rows.

    A thread takes several rows if that leaves no SM idle. If a scale is computed, a thread takes COMPUTED_LOADS loads of one
    row instead: each thread of a row repeats the work that follows from the row's maximum.
    """
    threads = rows * spec.lanes
    if spec.computes and spec.lanes > 1:
        fewer = threads // COMPUTED_LOADS >= FULL_GRID and spec.lanes >= COMPUTED_LOADS
        return replace(spec, lanes=spec.lanes // COMPUTED_LOADS) if fewer else spec
    converts = (spec.k_type, spec.v_type) != (spec.element_type, spec.element_type)
    return replace(spec, unroll=unroll_of(threads, converts, spec.rotary is not None))


def angle_columns(columns: int, half: bool) -> int:
    """Neighbouring cosines, and as many sines, that rotate the `columns` columns of one load."""
    return columns if half else max(1, columns // 2)


def unroll_of(threads: int, converts: bool, rotates: bool) -> int:
    """Rows that each thread has in flight, if one row each would take `threads` threads: the most that leave no SM idle.

    At most 2 if values are converted, which keeps the code small; 1 if values are rotated, since the cosines and sines are in
    flight too.
    """
    most = 1 if rotates else 2 if converts else UNROLLS[0]
    return next(unroll for unroll in UNROLLS if unroll == 1 or (unroll <= most and threads // unroll >= FULL_GRID))


def append_supports(spec: AppendSpec) -> list[str]:
    """Every reason why `spec` cannot be built; an empty list means that it can."""
    reasons = []
    if not 1 <= spec.head_dim <= MAX_HEAD_DIM:
        reasons.append(f"head_dim={spec.head_dim} is outside 1..{MAX_HEAD_DIM}")
    if spec.columns not in (1, 2, 4, 8) or spec.head_dim % spec.columns:
        reasons.append(f"columns={spec.columns} is not 1, 2, 4 or 8 that divides head_dim={spec.head_dim}")
    if spec.unroll not in UNROLLS:
        reasons.append(f"unroll={spec.unroll} is not one of {UNROLLS}")
    if spec.rotary is not None and spec.rotary.rotary_dim % (spec.columns * (1 + spec.rotary.half)):
        reasons.append(f"columns={spec.columns} do not divide what is rotated together of rotary_dim={spec.rotary.rotary_dim}")
    if spec.arch == "sm90" and spec.target != "sm_90a":
        reasons.append(f"conversion to fp8 by instruction needs sm_90a, target is {spec.target}")
    return reasons
