"""What a kernel of attention weights is compiled for, and its limits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from .decode import SCALE_BYTES, SMEM_BYTES
from .limits import cp_async_reasons, tma_reasons
from .problem import UNIT_BYTES
from .tiling import RingShape
from .warps import WarpSpec

WeightsType = Literal["none", "f32", "f16", "bf16"]

TILE_N = 32  # keys of a tile: each of a quad's four lanes then holds eight neighbouring keys, 16 bytes if weights have 16 bits
LANE_TOKENS = TILE_N // 4  # tokens of a tile that one lane stores
MAX_CTAS_PER_SM = 4  # with four warps each, 128 registers per thread
TARGET_CTAS_PER_SM = 3  # one CTA opens its row while the other two stream
TARGET_OF_TOKEN_SCALES = 4  # with TMA, which gains 1% at 64 x 8k; with cp.async, registers would spill
LEAST_CTAS_PER_SM = 2  # 1 x 8k keys are 64 chunks of four warps, less than half of an H200's SMs
STAGES = (2, 8)  # least and most of a warp's ring
MOST_WARPS = 4
WIDE_TILE_BYTES = 8192  # with larger tiles, two warps have as many bytes in flight as four
RESERVED_BYTES = 1024  # shared memory that the system reserves for each CTA
MAX_CTAS = 2**31 - 1  # of a grid
MAX_KEYS = 2**31 - 2**17  # of a row: the keys of its last chunk, which may reach past it, are counted in 32 bits
WEIGHT_BYTES = {"none": 0, "f32": 4, "f16": 2, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class WeightsSpec(WarpSpec):
    """Everything that changes the generated code of a kernel of attention weights. Hashable; the compile cache's key.

    num_kv_heads: KV heads that a CTA walks for each tile of keys. chunk: keys of a row that a CTA takes, whole pages if page
    masses are written. weights_type: the type in which weights are written, "none" if they are not. mean, page_mass: whether the
    mean over the heads, and its sum over each page, are written. store_bytes: bytes that one store of weights writes.
    V's fields repeat K's, since the kernel does not read V.
    """

    num_kv_heads: int
    chunk: int
    weights_type: WeightsType
    mean: bool
    page_mass: bool
    store_bytes: int

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.num_kv_heads * self.group_size

    @property
    def means(self) -> bool:
        """Whether weights are summed over the heads."""
        return self.mean or self.page_mass

    @property
    def depth(self) -> int:
        """Stages of a warp's ring."""
        return self.num_stages // self.num_warps

    @property
    def chunk_tiles(self) -> int:
        """Tiles of a chunk."""
        return -(-self.chunk // self.tile_n)

    @property
    def heads_shape(self) -> RingShape:
        """The query heads of a row in shared memory: one row of elements per head."""
        return RingShape(self.num_heads, self.num_heads, self.padded_head_dim, 1)

    @property
    def stage_bytes(self) -> int:
        """Shared memory of one stage: a tile, its tokens' scales and their flags, an mbarrier."""
        scales = SCALE_BYTES * (self.tile_n + 2) if self.k_token_scale else 0
        return self.rings[0].tile_bytes + scales + 8

    @property
    def smem_bytes(self) -> int:
        """Shared memory of one CTA in bytes."""
        stages = self.num_stages * self.stage_bytes
        heads = self.num_heads * (self.padded_head_dim * UNIT_BYTES + 2 * 4)
        return stages + heads + 4 * self.chunk_tiles * self.tile_n + 1024  # alignment

    @property
    def min_ctas_per_sm(self) -> int:
        """CTAs that an SM's registers must hold, a limit to the compiler: as many as its shared memory holds."""
        return max(1, min(MAX_CTAS_PER_SM, SMEM_BYTES[self.target] // (self.smem_bytes + RESERVED_BYTES)))


def chunk_of(page_size: int, num_warps: int, page_mass: bool) -> int:
    """Keys that a CTA takes: one tile per warp, rounded up to whole pages if page masses are written."""
    keys = TILE_N * num_warps
    return -(-keys // page_size) * page_size if page_mass else keys


def fitted(spec: WeightsSpec, batch_size: int, max_seq_len: int, sm_count: int) -> WeightsSpec:
    """`spec` with the warps of a CTA, its chunk, and as many stages as let the target number of CTAs share an SM.

    There are fewer warps if there would be too few chunks to give LEAST_CTAS_PER_SM to each SM. No bit of a result depends on
    this choice.
    """
    warps = MOST_WARPS if spec.rings[0].tile_bytes <= WIDE_TILE_BYTES else MOST_WARPS // 2
    chunk, fewer = (chunk_of(spec.page_size, count, spec.page_mass) for count in (warps, warps // 2))
    while batch_size * -(-max_seq_len // chunk) < LEAST_CTAS_PER_SM * sm_count and warps > 1 and fewer < chunk:
        warps, chunk = warps // 2, fewer
        fewer = chunk_of(spec.page_size, warps // 2, spec.page_mass)
    spec = replace(spec, num_warps=warps, num_stages=0, chunk=chunk)
    target = TARGET_OF_TOKEN_SCALES if spec.k_token_scale and spec.arch == "sm90" else TARGET_CTAS_PER_SM
    room = SMEM_BYTES[spec.target] // target - RESERVED_BYTES - spec.smem_bytes
    least, most = STAGES
    return replace(spec, num_stages=warps * max(least, min(most, room // (warps * spec.stage_bytes))))


def weights_supports(spec: WeightsSpec) -> list[str]:
    """Every reason why `spec` cannot be built; an empty list means that it can."""
    reasons = []
    if not 1 <= spec.head_dim <= 256:
        reasons.append(f"head_dim={spec.head_dim} is outside 1..256")
    if spec.tile_n != TILE_N:
        reasons.append(f"tile_n={spec.tile_n} is not {TILE_N}")
    if spec.num_warps not in (1, 2, 4) or spec.num_stages % spec.num_warps:
        reasons.append(f"num_stages={spec.num_stages} is not a multiple of num_warps={spec.num_warps}, 1, 2 or 4")
    if spec.page_mass and (not spec.page_size or spec.chunk % spec.page_size):
        reasons.append(f"chunk={spec.chunk} is no multiple of page_size={spec.page_size}, whose masses are written")
    if spec.weights_type != "none" and spec.store_bytes % WEIGHT_BYTES[spec.weights_type]:
        reasons.append(f"store_bytes={spec.store_bytes} is no multiple of a weight's {WEIGHT_BYTES[spec.weights_type]}")
    if spec.smem_bytes > SMEM_BYTES[spec.target]:
        rows = f"{spec.num_heads} query heads of {spec.padded_head_dim} columns and a chunk of {spec.chunk} keys"
        reasons.append(f"shared memory {spec.smem_bytes} bytes, for {rows}, exceeds {SMEM_BYTES[spec.target]} on {spec.target}")
    return reasons + (tma_reasons(spec) if spec.arch == "sm90" else cp_async_reasons(spec))
