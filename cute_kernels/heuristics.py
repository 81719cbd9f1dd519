"""The choice of a configuration where no tuned plan has one: tiles from the head, splits from a cost model.

Decode is a stream of the KV cache, so a launch takes the longer of two times: all bytes at the device's bandwidth, or the
waves of CTAs, each at the bandwidth that one SM can draw alone. Cutting rows shortens the waves and costs a combine.
Constants are measured on an H200 (docs/notes/kernel-log.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from .config import ELEMENT_BYTES, MAX_SPLITS, SMEM_BYTES, TILE_M, Arch, DecodeConfig, Target, padded_head_dim, smem_bytes
from .descriptors import DecodeProblem

ASSUMED_SEQ_LEN = 8192  # tokens a row where the descriptor gives no max_seq_len
MIN_TOKENS_PER_SPLIT = 128
TILE_BYTES = {"sm90": 16_384, "sm80": 8_192}  # K and V of one tile
STAGES_PER_WARP = {"sm90": 2, "sm80": 4}


@dataclass(frozen=True)
class Rates:
    """Bandwidth in bytes a microsecond: of all SMs, and of one SM alone; microseconds of a combine and of each split."""

    device: float
    sm: float
    combine: float
    per_split: float


RATES = {"sm_90a": Rates(4.6e6, 65e3, 2.0, 0.05), "sm_80": Rates(1.8e6, 32e3, 3.0, 0.05)}


def choose(problem: DecodeProblem, arch: Arch, target: Target, sm_count: int) -> DecodeConfig:
    """The heuristic's configuration of `problem` for a mainloop and a target with `sm_count` SMs."""
    tile_n = tile_tokens(problem.head_dim, arch)
    num_warps, num_stages = ring(problem.head_dim, tile_n, arch, target)
    return DecodeConfig(tile_n, num_stages, num_warps, splits(problem, target, sm_count))


def tile_tokens(head_dim: int, arch: Arch) -> int:
    """KV tokens of a tile: the power of two, 16 to 64 (32 for cp.async), whose K and V fill TILE_BYTES."""
    largest = 64 if arch == "sm90" else 32
    tokens = TILE_BYTES[arch] // (2 * ELEMENT_BYTES * padded_head_dim(head_dim))
    return max(16, min(largest, 1 << (max(tokens, 1).bit_length() - 1)))


def ring(head_dim: int, tile_n: int, arch: Arch, target: Target) -> tuple[int, int]:
    """(warps, stages): as many stages a warp as STAGES_PER_WARP says, with as many warps up to four as then fit."""
    per_warp = STAGES_PER_WARP[arch]
    for depth in range(per_warp, 1, -1):
        for num_warps in (4, 2):
            if smem_bytes(head_dim, tile_n, depth * num_warps) <= SMEM_BYTES[target]:
                return num_warps, depth * num_warps
    return 1, 2


def splits(problem: DecodeProblem, target: Target, sm_count: int) -> int:
    """The number of splits with the least predicted time; the fewest on a tie."""
    seq_len = problem.max_seq_len or ASSUMED_SEQ_LEN
    limit = max(1, min(MAX_SPLITS, seq_len // MIN_TOKENS_PER_SPLIT, 2 * sm_count))
    return min(range(1, limit + 1), key=lambda n: (predicted_us(problem, seq_len, n, target, sm_count), n))


def predicted_us(problem: DecodeProblem, seq_len: int, num_splits: int, target: Target, sm_count: int) -> float:
    """Microseconds of a launch with rows of `seq_len` tokens in `num_splits` pieces, launch overhead left out."""
    rates = RATES[target]
    row_bytes = 2.0 * ELEMENT_BYTES * seq_len * problem.head_dim
    rows = max(1, problem.batch_size * problem.num_kv_heads)
    ctas = rows * -(-problem.group_size // TILE_M) * num_splits
    waves = -(-ctas // sm_count)
    stream = max(rows * row_bytes / rates.device, waves * row_bytes / num_splits / rates.sm)
    return stream + (rates.combine + rates.per_split * num_splits if num_splits > 1 else 0.0)
