"""The choice of a configuration where no tuned plan has one: tiles from the head, the ring and the grid from the batch.

Constants are measured on an H200 (docs/notes/kernel-log.md).
"""

from __future__ import annotations

from .config import ELEMENT_BYTES, SMEM_BYTES, TWO_CTAS_HEAD_DIM, Arch, DecodeConfig, Target, padded_head_dim, smem_bytes
from .descriptors import DecodeProblem

TILE_BYTES = {"sm90": 16_384, "sm80": 8_192}  # K and V of one tile
LARGEST_TILE_N = {"sm90": 64, "sm80": 32}
RING_BYTES = 131_072  # in flight on an SM, over all its CTAs: more gains nothing
SHALLOWEST = {"sm90": 1, "sm80": 2}  # stages a warp
ASSUMED_SEQ_LEN = 8192  # tokens a row where the descriptor gives no max_seq_len
SHORT_STREAM = 64e6  # KV bytes up to which latency counts: eight warps on half tiles end 0.9 us sooner at 1 x 8k
LONG_STREAM = 400e6  # KV bytes from which two CTAs an SM pay: 2% at 64 x 8k, 3% ragged; below, one ends sooner
WIDE_GROUP = 8  # query heads a KV head from which larger tiles pay: 1% at 64 x 8k with 8/1


def choose(problem: DecodeProblem, arch: Arch, target: Target, sm_count: int) -> DecodeConfig:
    """The heuristic's configuration of `problem` for a mainloop and a target with `sm_count` SMs."""
    two = target == "sm_90a" and kv_bytes(problem) >= LONG_STREAM and problem.head_dim <= TWO_CTAS_HEAD_DIM
    short = arch == "sm90" and kv_bytes(problem) <= SHORT_STREAM
    ctas_per_sm = 2 if two else 1
    tile_bytes = TILE_BYTES[arch]
    if short:
        tile_bytes //= 2
    elif problem.group_size >= WIDE_GROUP and arch == "sm90" and not two and problem.head_dim <= TWO_CTAS_HEAD_DIM:
        tile_bytes *= 2
    tile_n = tile_tokens(problem.head_dim, arch, tile_bytes)
    num_warps, num_stages = ring(problem, tile_n, 8 if short else 4, ctas_per_sm, arch, target)
    return DecodeConfig(tile_n, num_stages, num_warps, ctas_per_sm)


def kv_bytes(problem: DecodeProblem) -> int:
    """Bytes of K and V where every row has max_seq_len tokens, or ASSUMED_SEQ_LEN when that is unknown."""
    tokens = problem.batch_size * (problem.max_seq_len or ASSUMED_SEQ_LEN)
    return 2 * ELEMENT_BYTES * tokens * problem.num_kv_heads * problem.head_dim


def tile_tokens(head_dim: int, arch: Arch, tile_bytes: int) -> int:
    """KV tokens of a tile: the power of two from 16 on whose K and V fill `tile_bytes`."""
    tokens = tile_bytes // (2 * ELEMENT_BYTES * padded_head_dim(head_dim))
    return max(16, min(LARGEST_TILE_N[arch], 1 << (max(tokens, 1).bit_length() - 1)))


def ring(problem: DecodeProblem, tile_n: int, most_warps: int, ctas_per_sm: int, arch: Arch, target: Target) -> tuple[int, int]:
    """(warps, stages): the deepest ring within RING_BYTES, with the most warps that shared memory then allows."""
    tile_bytes = 2 * ELEMENT_BYTES * tile_n * padded_head_dim(problem.head_dim)
    deepest = RING_BYTES // ctas_per_sm // tile_bytes
    for num_warps in (w for w in (8, 4, 2, 1) if w <= most_warps):
        shallowest = SHALLOWEST[arch] * num_warps
        for num_stages in range(max(deepest // num_warps * num_warps, shallowest), shallowest - 1, -num_warps):
            needed = smem_bytes(problem.head_dim, problem.group_size, tile_n, num_stages, num_warps)
            if needed <= SMEM_BYTES[target] // ctas_per_sm:
                return num_warps, num_stages
    return 1, SHALLOWEST[arch]
