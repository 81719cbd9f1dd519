"""Which specs of attention kernels cannot be built: `supports` is the one predicate that knows the limits."""

from __future__ import annotations

from .decode import MAX_CP_ASYNC_TILE_N, MAX_SPLIT_TILE_ELEMENTS, MAX_TILE_ELEMENTS, SMEM_BYTES, KernelSpec
from .problem import step_columns
from .tiling import HALF_TILE_M, MIN_BOX_ROWS, TILE_M, WARPGROUP_M, MmaScope, TilingSpec

# the largest padded head_dim for warpgroups that take turns, by whether other warps widen tiles: above, registers spill (by SASS)
TURNS_HEAD_DIM = {False: 192, True: 128}
LONG_WARPGROUP_HEAD_DIM, SHORT_TILE_N = 128, 32  # above this head_dim, a warpgroup's tiles are this short, for the same reason


# the most registers of a thread for the output, scores and weights of a warpgroup whose products overlap, by the number of warps
# that attend; fewer if other warps widen tiles. With more, registers spill, or ptxas puts a wait after each wgmma (from SASS)
OVERLAP_TILE_REGISTERS = {4: 188, 8: 188, 12: 128}
SOFTCAP_REGISTERS = {12: 8}  # so many fewer if the loop computes a soft cap's tanh
WIDENING_TILE_REGISTERS = {4: 188, 8: 148, 12: 112}

MOST_TURNS = 2  # of warpgroups: a widened tile has a stage for each
MOST_GATHERED_WARPS = 8  # more warps that attend leave too few registers to the producers that gather tokens


def most_tile_n(padded_head_dim: int, v_bytes: int, mma: MmaScope = "warp") -> int:
    """The most KV tokens of a tile: with more, a thread needs more registers than it has."""
    if mma == "warpgroup":
        most = 2 * MAX_TILE_ELEMENTS // padded_head_dim // TILE_M * TILE_M
        return most if padded_head_dim <= LONG_WARPGROUP_HEAD_DIM else min(most, SHORT_TILE_N)
    widest = 16 if v_bytes > 1 else 32  # at head_dim 256, where the output alone takes 128 registers
    fits = MAX_TILE_ELEMENTS // padded_head_dim
    if v_bytes > 2:  # f32: products take operands in parts
        fits = max(TILE_M, MAX_SPLIT_TILE_ELEMENTS // padded_head_dim // TILE_M * TILE_M)
    return min(fits, widest) if padded_head_dim > 192 else fits


def overlap_registers(spec: KernelSpec) -> tuple[int, int]:
    """(registers that a thread needs for the output, scores and weights of its warpgroup's tile, registers that it has)."""
    needed = spec.padded_v_head_dim // 2 + spec.tile_n // 2 + spec.tile_n // 4
    most = WIDENING_TILE_REGISTERS if spec.widens_tiles else OVERLAP_TILE_REGISTERS
    taken = SOFTCAP_REGISTERS.get(spec.num_warps, 0) if spec.modifiers.softcap else 0
    return needed, most.get(spec.num_warps, 0) - taken


def supports(spec: KernelSpec) -> list[str]:
    """Every reason why `spec` cannot be built; an empty list means that it can."""
    reasons = []
    if not 1 <= spec.head_dim <= 256:
        reasons.append(f"head_dim={spec.head_dim} is outside 1..256")
    if not 1 <= spec.v_head_dim <= spec.head_dim:
        reasons.append(f"v_head_dim={spec.v_head_dim} is outside 1..head_dim={spec.head_dim}: out goes through the query's rows")
    if spec.tile_n < 16 or spec.tile_n % 16:
        reasons.append(f"tile_n={spec.tile_n} is not a positive multiple of 16")
    counts = (1, 2, 4, 8, 12) if spec.overlaps and (spec.dealt or not spec.split) else (1, 2, 4, 8)
    if spec.num_warps not in counts:
        reasons.append(f"num_warps={spec.num_warps} is not one of {', '.join(map(str, counts))}")
    if spec.splits or "f32" in (spec.k_type, spec.v_type):
        reasons += _split_reasons(spec)
    if spec.several:
        reasons += _query_reasons(spec)
    if spec.by_warpgroup:
        reasons += _warpgroup_reasons(spec)
    if spec.dealt and not (spec.settles_alone and spec.several):
        reasons.append(f"partition={spec.partition} needs several query rows, and warpgroups that all attend to the same tiles")
    readers = max(1, spec.stage_turns)
    if spec.num_stages % readers:
        of = f"num_warps={spec.num_warps}" if spec.readers == 1 else f"the {readers} turns of its warps"
        reasons.append(f"num_stages={spec.num_stages} is not a multiple of {of}: a stage has one reader")
    if not spec.overlaps and spec.tile_n > most_tile_n(spec.padded_head_dim, spec.v_bytes, spec.mma):
        reasons.append(f"tile_n={spec.tile_n} x head_dim={spec.padded_head_dim} needs more registers than a thread has")
    if spec.smem_bytes > SMEM_BYTES[spec.target]:
        reasons.append(f"shared memory {spec.smem_bytes} bytes exceeds {SMEM_BYTES[spec.target]} on {spec.target}")
    if spec.arch == "sm90":
        reasons += tma_reasons(spec) + (_gather_reasons(spec) if spec.gathers else [])
    else:
        reasons += cp_async_reasons(spec)
    if spec.unit_heads > 1:
        reasons += _unit_reasons(spec)
    return reasons


def cp_async_reasons(spec: TilingSpec) -> list[str]:
    """Why the cp.async mainloop cannot bring its tiles."""
    reasons = []
    if spec.row_tiles == 1 and spec.num_stages < 2 * spec.num_warps:
        reasons.append(f"num_stages={spec.num_stages} gives a warp's cp.async ring fewer than 2 stages")
    if spec.shares_ring and spec.num_stages < 2:
        reasons.append(f"num_stages={spec.num_stages} gives a cp.async ring fewer than 2 stages")
    if spec.tile_n > MAX_CP_ASYNC_TILE_N:
        reasons.append(f"tile_n={spec.tile_n} exceeds {MAX_CP_ASYNC_TILE_N}, the tokens whose pages one warp looks up")
    least, most = sorted((spec.k_bytes, spec.v_bytes))
    if spec.vector_bytes not in (1, 2, 4, 8, 16) or spec.head_dim * least % spec.vector_bytes:
        reasons.append(
            f"vector_bytes={spec.vector_bytes} is not 1, 2, 4, 8 or 16 bytes that divide a head of {spec.head_dim} elements"
        )
    elif spec.vector_bytes < most:
        reasons.append(f"vector_bytes={spec.vector_bytes} is less than an element of {most} bytes")
    return reasons


def tma_reasons(spec: TilingSpec) -> list[str]:
    """Why TMA cannot bring its tiles."""
    reasons = []
    if spec.target != "sm_90a":
        reasons.append(f"TMA needs sm_90a, target is {spec.target}")
    if spec.vector_bytes != 16:
        reasons.append(f"TMA needs 16-byte aligned strides, got {spec.vector_bytes}")
    if spec.head_dim != spec.padded_head_dim or spec.v_head_dim != spec.padded_v_head_dim:
        columns = step_columns(min(spec.k_bytes, spec.v_bytes))
        reasons.append(f"TMA needs head_dim to be a multiple of {columns}, got {spec.head_dim}")
    if spec.source == "paged" and spec.page_size % MIN_BOX_ROWS and not spec.gathers:
        reasons.append(f"TMA needs page_size to be a multiple of {MIN_BOX_ROWS}, got {spec.page_size}")
    if spec.box_rows > 256:
        reasons.append(f"a TMA box has at most 256 rows, got {spec.box_rows}")
    return reasons


def _gather_reasons(spec: KernelSpec) -> list[str]:
    reasons = []
    where = f"pages of {spec.page_size} tokens, which no TMA box brings, are gathered"
    if not spec.dealt:
        return [
            f"TMA needs page_size to be a multiple of {MIN_BOX_ROWS}, got {spec.page_size}; for long queries tokens are gathered"
        ]
    if min(spec.k_bytes, spec.v_bytes) == 1 or spec.token_scales:
        reasons.append(f"{where} from caches of 16 bits alone, and without scales a token")
    if spec.num_warps > MOST_GATHERED_WARPS:
        reasons.append(f"{where} beside {MOST_GATHERED_WARPS} warps at most, got num_warps={spec.num_warps}")
    return reasons


def _split_reasons(spec: KernelSpec) -> list[str]:
    reasons = []
    if not spec.element_type == spec.k_type == spec.v_type:
        reasons.append(f"f32 is of q, K and V alike, got {spec.element_type}, {spec.k_type} and {spec.v_type}")
    if (spec.k_scale, spec.v_scale) != ("none", "none"):
        reasons.append("k_scale, v_scale: caches of f32 take none")
    if spec.by_warpgroup:
        reasons.append("mma=warpgroup reads K and V of 16 bits from shared memory")
    return reasons


def _query_reasons(spec: KernelSpec) -> list[str]:
    reasons = []
    if spec.block_rows != HALF_TILE_M and (spec.block_rows < TILE_M or spec.block_rows % TILE_M):
        reasons.append(f"block_rows={spec.block_rows} is not {HALF_TILE_M} or a multiple of {TILE_M}")
    if spec.num_warps % spec.readers or spec.row_tiles % spec.warp_tiles:
        reasons.append(f"the {spec.row_tiles} m-tiles of block_rows={spec.block_rows} do not divide num_warps={spec.num_warps}")
    if spec.shares_ring:
        reasons += _shared_ring_reasons(spec)
    if spec.unit_heads > 1 and (spec.tile_producers == 1 or spec.readers > 1 or spec.many_blocks):
        reasons.append(
            f"unit_heads={spec.unit_heads} of several query rows take tokens' scales and warps of all a head's m-tiles"
        )
    return reasons


def _shared_ring_reasons(spec: KernelSpec) -> list[str]:
    reasons = []
    shared = f"block_rows={spec.block_rows} on sm80 shares a ring between the warps"
    if spec.turns != 1:
        reasons.append(f"{shared}: all of num_warps={spec.num_warps} must attend to each tile")
    if spec.split:
        reasons.append(f"{shared}, which cuts no row")
    return reasons


def _warpgroup_reasons(spec: KernelSpec) -> list[str]:
    reasons = []
    if spec.arch != "sm90":
        reasons.append("mma=warpgroup needs the TMA mainloop")
    if spec.block_rows < WARPGROUP_M or spec.block_rows % WARPGROUP_M:
        reasons.append(f"block_rows={spec.block_rows} is not a multiple of the {WARPGROUP_M} rows of a warpgroup's step")
    if spec.readers > spec.num_warps or spec.num_warps % spec.readers:
        reasons.append(f"the {spec.readers} m-tiles of block_rows={spec.block_rows} do not divide num_warps={spec.num_warps}")
    if spec.unit_heads > 1:
        reasons.append(f"unit_heads={spec.unit_heads} takes tensor-core steps of a warp")
    if spec.turns > MOST_TURNS:
        reasons.append(f"num_warps={spec.num_warps} take tiles in {spec.turns} turns, of which there are {MOST_TURNS} at most")
    if spec.overlaps:
        needed, most = overlap_registers(spec)
        if needed > most:
            reasons.append(f"tile_n={spec.tile_n} x head_dim={spec.padded_head_dim} needs {needed} registers a thread of {most}")
    if spec.turns > 1 and spec.padded_head_dim > TURNS_HEAD_DIM[spec.widens_tiles]:
        reasons.append(f"head_dim={spec.head_dim} leaves a thread of {spec.num_warps} warps too few registers")
    return reasons


def _unit_reasons(spec: KernelSpec) -> list[str]:
    reasons = []
    if spec.arch != "sm90":
        reasons.append(f"unit_heads={spec.unit_heads} needs the TMA mainloop")
    if spec.unit_heads > 2:
        reasons.append(f"unit_heads={spec.unit_heads} is not 1 or 2")
    if spec.unit_rows > TILE_M and not spec.several:
        reasons.append(f"unit_heads={spec.unit_heads} of {spec.group_size} query heads each exceed the {TILE_M} rows of a tile")
    if spec.num_warps % spec.unit_heads:
        reasons.append(f"unit_heads={spec.unit_heads} does not divide num_warps={spec.num_warps}: a warp attends to one KV head")
    if "head" in (spec.k_scale, spec.v_scale):
        reasons.append(f"unit_heads={spec.unit_heads} takes no scale a KV head")
    return reasons
