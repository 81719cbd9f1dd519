"""What an append to a paged KV cache is compiled for, and the limits of that kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .config import Arch, ElementType, StoredType, Target

ScaleKind = Literal["none", "tensor", "head", "token_dynamic"]
ScaleType = Literal["f16", "f32"]
SlotType = Literal["i32", "i64"]

MAX_HEAD_DIM = 256
MAX_COLUMNS = 8  # neighbouring 16-bit columns that one load of 16 bytes brings
CTA_THREADS = 128
WARP = 32


@dataclass(frozen=True)
class AppendSpec:
    """Everything that changes the generated code of an append. Hashable; the compile cache's key.

    arch: "sm90" converts to fp8 by instruction, "sm80" in integers, with the same bits. element_type: of the incoming K and V.
    columns: neighbouring ones that one load brings, 1, 2, 4 or 8. nhd: the axis order of the caches. scale_type: of the scales
    that are written ("token_dynamic"), "f32" otherwise. The tokens, the KV heads, the pages and every stride but the last are
    dynamic.
    """

    arch: Arch
    target: Target
    element_type: ElementType
    stored_type: StoredType
    head_dim: int
    page_size: int
    columns: int
    nhd: bool
    scales: ScaleKind
    scale_type: ScaleType
    slot_type: SlotType

    @property
    def pieces(self) -> int:
        """Loads that one (token, head) row takes."""
        return self.head_dim // self.columns

    @property
    def lanes(self) -> int:
        """Threads of a warp that share a row: a power of two."""
        return min(WARP, 1 << (self.pieces - 1).bit_length())

    @property
    def rounds(self) -> int:
        """Pieces of a row that one thread takes."""
        return -(-self.pieces // self.lanes)

    @property
    def rows_per_cta(self) -> int:
        """(token, head) rows of K and of V that one CTA appends."""
        return CTA_THREADS // self.lanes


def append_supports(spec: AppendSpec) -> list[str]:
    """Every reason why `spec` cannot be built; an empty list means that it can."""
    reasons = []
    if not 1 <= spec.head_dim <= MAX_HEAD_DIM:
        reasons.append(f"head_dim={spec.head_dim} is outside 1..{MAX_HEAD_DIM}")
    if spec.columns not in (1, 2, 4, 8) or spec.head_dim % spec.columns:
        reasons.append(f"columns={spec.columns} is not 1, 2, 4 or 8 that divides head_dim={spec.head_dim}")
    if spec.arch == "sm90" and spec.target != "sm_90a":
        reasons.append(f"conversion to fp8 by instruction needs sm_90a, target is {spec.target}")
    return reasons
