"""Page geometry as plain functions: bytes, the TMA box of a page, pages of a row, shared memory and threads of a CTA."""

from __future__ import annotations

from dataclasses import dataclass

from ..checks.fields import is_int
from ..config.tiling import Arch
from ..config.warps import PRODUCER_WARPS
from ..errors import InvalidProblem, MisalignedOperand

TMA_BYTES = 16  # a TMA box's inner extent, its strides and its base are multiples of this
F32_BYTES = 4
TMA_MAX_BOX = 256  # elements of one box dimension


@dataclass(frozen=True)
class TmaBox:
    """What one TMA load of a page brings: `outer` tokens of `inner` elements."""

    num_dims: int
    inner: int
    outer: int
    element_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes that the box lands in shared memory."""
        return self.inner * self.outer * self.element_bytes


def block_bytes(page_size: int, head_dim: int, element_bytes: int) -> int:
    """Bytes of one page of one KV head, K and V together."""
    return 2 * page_stride_bytes(page_size, head_dim, element_bytes)


def page_stride_bytes(page_size: int, head_dim: int, element_bytes: int) -> int:
    """Bytes from one page to the next in a compact cache of one KV head, K or V alone."""
    _check_positive(page_size=page_size, head_dim=head_dim, element_bytes=element_bytes)
    return page_size * head_dim * element_bytes


def tma_box(page_size: int, head_dim: int, element_bytes: int, stride_bytes: tuple[int, ...] = ()) -> TmaBox:
    """The box of a page of one KV head: [page_size, head_dim] elements.

    stride_bytes: the cache's strides but the last, in bytes. Raises MisalignedOperand where a row or a stride is no
    multiple of 16 bytes, InvalidProblem where a stride is none above 0, or an extent exceeds what a box may have (256).
    """
    _check_positive(page_size=page_size, head_dim=head_dim, element_bytes=element_bytes)
    for name, extent in (("page_size", page_size), ("head_dim", head_dim)):
        if extent > TMA_MAX_BOX:
            raise InvalidProblem(name, extent, f"a TMA box has at most {TMA_MAX_BOX} elements a dimension")
    if head_dim * element_bytes % TMA_BYTES:
        raise MisalignedOperand("head_dim * element_bytes", head_dim * element_bytes, TMA_BYTES)
    if not isinstance(stride_bytes, tuple):
        raise InvalidProblem("stride_bytes", stride_bytes, "must be a tuple of ints")
    for stride in stride_bytes:
        _check_positive(stride_bytes=stride)
        if stride % TMA_BYTES:
            raise MisalignedOperand("stride_bytes", stride, TMA_BYTES)
    return TmaBox(num_dims=2, inner=head_dim, outer=page_size, element_bytes=element_bytes)


def pages_of_row(seq_len: int, page_size: int) -> int:
    """Pages that hold `seq_len` tokens: ceil(seq_len / page_size)."""
    _check_positive(page_size=page_size)
    _check_least(0, seq_len=seq_len)
    return -(-seq_len // page_size)


def group_size(num_heads: int, num_kv_heads: int) -> int:
    """Query heads that share one KV head."""
    _check_positive(num_heads=num_heads, num_kv_heads=num_kv_heads)
    if num_heads % num_kv_heads:
        raise InvalidProblem("num_heads", num_heads, f"must be a multiple of num_kv_heads = {num_kv_heads}")
    return num_heads // num_kv_heads


def smem_bytes(page_size: int, head_dim: int, element_bytes: int, num_stages: int, rows: int = 16) -> int:
    """What a CTA holds at least, in shared memory: `num_stages` pages of K and of V of one KV head, and `rows` query rows."""
    _check_positive(num_stages=num_stages, rows=rows)
    return num_stages * block_bytes(page_size, head_dim, element_bytes) + rows * head_dim * element_bytes


def split_workspace_bytes(batch_size: int, num_heads: int, num_splits: int, head_dim: int) -> int:
    """Bytes of the f32 states (maximum, sum, output) of num_splits parts of each row and head; 0 for an empty batch.

    What an implementation with a fixed number of splits needs (Flash-Decoding, Dao et al. 2023). Plans cut rows where the shares
    of their CTAs end, and say what they need: `plan.workspace_size()`, which does not grow with the batch.
    """
    _check_positive(num_heads=num_heads, num_splits=num_splits, head_dim=head_dim)
    _check_least(0, batch_size=batch_size)
    return batch_size * num_heads * num_splits * (2 + head_dim) * F32_BYTES


def threads(arch: Arch, num_warps: int) -> int:
    """Threads of one CTA: the consumer warps and, on sm90, the producer warps."""
    _check_positive(num_warps=num_warps)
    if arch not in PRODUCER_WARPS:
        raise InvalidProblem("arch", arch, f"must be {' or '.join(map(repr, PRODUCER_WARPS))}")
    return 32 * (num_warps + PRODUCER_WARPS[arch])


def _check_positive(**extents: int) -> None:
    _check_least(1, **extents)


def _check_least(least: int, **extents: int) -> None:
    """Checks that each extent is an int of at least `least`."""
    for name, extent in extents.items():
        if not is_int(extent) or extent < least:
            raise InvalidProblem(name, extent, f"must be an int of at least {least}")
