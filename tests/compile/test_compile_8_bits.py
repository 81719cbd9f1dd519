"""Builds decode kernels for 8-bit caches without a GPU and reads the machine code: what a tile takes, and no spills."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

import cute_kernels as ck
from cute_kernels.attention.choice.heuristics import candidates
from cute_kernels.attention.descriptors import DecodeProblem
from cute_kernels.attention.kernel_spec import kernel_spec
from cute_kernels.config.decode import DecodeConfig, KernelSpec
from cute_kernels.config.limits import supports
from cute_kernels.config.tiling import Target
from tests.compile.test_compile import assert_no_spills, dump

E4M3, E5M2, INT8, BF16 = ck.KVDtype.E4M3, ck.KVDtype.E5M2, ck.KVDtype.INT8, ck.KVDtype.BF16
NONE, HEAD, TOKEN, TOKEN_F16 = ck.KVScale.NONE, ck.KVScale.HEAD, ck.KVScale.TOKEN, ck.KVScale.TOKEN_F16
STORAGES = ((E4M3, E4M3), (INT8, INT8), (E5M2, E5M2), (BF16, E4M3), (INT8, BF16), (E4M3, INT8))
GROUPS = (1, 4, 16)
LDMATRIX_BYTES = 512  # of a tile, by one ldmatrix.x4 of a warp
MMA = 8 * 16  # elements of a tile, K or V, of one m16n8k16
CONVERTED = 32 * 2  # elements of a tile that a warp converts at once: two a lane

Storage = tuple[ck.KVDtype, ck.KVDtype]
Scales = tuple[ck.KVScale, ck.KVScale]


def problem(head_dim: int, group_size: int, storage: Storage, scales: Scales, page_size: int = 16) -> DecodeProblem:
    """A batch of 8,192-token rows and 8 KV heads, bf16 queries."""
    stored = {"kv_dtype": storage[0], "v_dtype": storage[1], "k_scale": scales[0], "v_scale": scales[1]}
    shape = (64, 8 * group_size, 8, head_dim, page_size, torch.bfloat16)
    return ck.PagedDecodeDescriptor(*shape, max_seq_len=8192, **stored).problem


def proposals() -> list:
    """(problem, config) of each configuration that is proposed for each head_dim, with scales a token and without; in turn
    for groups of 1, 4 and 16, and for what K and V may be stored as.
    """
    found = []
    for head_dim, scaled in product((64, 128, 192, 256), (False, True)):
        scales = [(TOKEN_F16, TOKEN_F16), (TOKEN, HEAD), (HEAD, TOKEN)] if scaled else [(NONE, NONE), (HEAD, NONE), (NONE, HEAD)]
        for index in range(3):
            group, storage = GROUPS[(index + len(found)) % 3], STORAGES[len(found) % len(STORAGES)]
            described = problem(head_dim, group, storage, scales[index])
            configs = candidates(described, "sm90", "sm_90a", 132)
            if index < len(configs):
                found.append(pytest.param(described, configs[index], id=name(described, configs[index])))
    return found


def name(described: DecodeProblem, config: DecodeConfig) -> str:
    """A case in a test's name."""
    scales = f"{described.k_scale} {described.v_scale}"
    return (
        f"d{described.head_dim} group {described.group_size} {described.cache_type} {scales} {config.tile_n}x{config.num_warps}"
    )


def check_tile(spec: KernelSpec, ptx: str) -> None:
    """MMAs of each type, matrix loads and conversions of one tile."""
    elements = spec.tile_n * spec.padded_head_dim
    for element_type in ("f16", "bf16"):
        expected = elements // MMA * [spec.k_math, spec.v_math].count(element_type)
        assert len(re.findall(rf"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.{element_type}\.", ptx)) == expected
    assert len(re.findall(r"ldmatrix\S*\.x4\.", ptx)) == spec.tile_bytes // LDMATRIX_BYTES
    converted = elements // CONVERTED * [spec.k_type, spec.v_type].count("e4m3") if spec.arch == "sm90" else 0
    assert ptx.count("cvt.rn.f16x2.e4m3x2") == converted


@pytest.mark.parametrize(("described", "config"), proposals())
def test_sm90(described: DecodeProblem, config: DecodeConfig, tmp_path: Path) -> None:
    spec = kernel_spec(described, "sm90", "sm_90a", config, partition="balanced")
    ptx, sass = dump(spec, tmp_path)
    check_tile(spec, ptx)
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.[45]d", ptx)) == 2 * spec.tile_n // spec.box_rows
    assert ("cp.async.mbarrier.arrive.noinc" in ptx) == (spec.token_scales > 0), "scales arrive beside the boxes"
    assert_no_spills(sass)


@pytest.mark.parametrize("storage", [(INT8, INT8), (BF16, INT8)], ids=["int8", "bf16 and int8"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_two_kv_heads_a_cta(head_dim: int, storage: Storage, tmp_path: Path) -> None:
    """The producers' part is there twice, the consumers' once: a warp attends to the tiles of one of the heads."""
    described = problem(head_dim, 4, storage, (NONE if storage[0] is BF16 else TOKEN_F16, TOKEN))
    (config,) = (c for c in candidates(described, "sm90", "sm_90a", 132) if c.unit_heads == 2)
    spec = kernel_spec(described, "sm90", "sm_90a", config, partition="balanced")
    ptx, sass = dump(spec, tmp_path)
    check_tile(spec, ptx)
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.[45]d", ptx)) == 2 * 2 * spec.tile_n // spec.box_rows
    assert_no_spills(sass)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_two_kv_heads_of_paired_warps(head_dim: int, tmp_path: Path) -> None:
    """A producer brings the tiles of one head, and a warp attends to those of one: both parts are there once."""
    stored = {"kv_dtype": INT8, "k_scale": TOKEN_F16, "v_scale": TOKEN_F16, "max_seq_len": 1024}
    described = ck.PagedAttentionDescriptor(64, 32, 8, head_dim, 16, torch.bfloat16, max_q_len=8, **stored).problem
    (config,) = candidates(described, "sm90", "sm_90a", 132)
    assert (config.unit_heads, config.num_warps) == (2, 8)
    spec = kernel_spec(described, "sm90", "sm_90a", config, partition="balanced")
    ptx, sass = dump(spec, tmp_path)
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.[45]d", ptx)) == 2 * spec.tile_n // spec.box_rows
    assert_no_spills(sass)


@pytest.mark.parametrize(
    ("target", "described"),
    [
        pytest.param(target, described, id=f"{target} {name(described, candidates(described, 'sm80', target, 132)[-1])}")
        for target, described in (
            ("sm_80", problem(64, 1, (E4M3, E4M3), (NONE, NONE), page_size=1)),
            ("sm_80", problem(128, 16, (E4M3, E4M3), (TOKEN, TOKEN), page_size=1)),
            ("sm_80", problem(256, 4, (E5M2, E5M2), (HEAD, TOKEN_F16), page_size=1)),
            ("sm_80", problem(192, 16, (INT8, INT8), (TOKEN_F16, TOKEN_F16), page_size=1)),
            ("sm_80", problem(128, 4, (BF16, E4M3), (NONE, HEAD), page_size=1)),
            ("sm_90a", problem(128, 4, (E4M3, E4M3), (NONE, NONE), page_size=1)),
            ("sm_90a", problem(256, 16, (INT8, E4M3), (TOKEN_F16, TOKEN), page_size=1)),
            ("sm_90a", problem(100, 1, (E4M3, BF16), (TOKEN, NONE), page_size=1)),
        )
    ],
)
def test_sm80(target: Target, described: DecodeProblem, tmp_path: Path) -> None:
    """Pages of one token. A100's kernels convert in integers."""
    config = candidates(described, "sm80", target, 132)[-1]
    spec = kernel_spec(described, "sm80", target, config, partition="balanced")
    ptx, sass = dump(spec, tmp_path)
    assert f".target {target}" in ptx
    assert "cp.async.bulk" not in ptx
    check_tile(spec, ptx)
    assert_no_spills(sass[sass.index("HMMA") : sass.rindex("HMMA") + 4])


@pytest.mark.parametrize("scaled", [False, True], ids=["no scales", "token scales"])
@pytest.mark.parametrize(("head_dim", "tile_n"), [(64, 128), (128, 64), (192, 32), (256, 32)])
def test_the_largest_tiles_that_supports_allows_keep_their_registers(
    head_dim: int, tile_n: int, scaled: bool, tmp_path: Path
) -> None:
    """With full rows; twice as many tokens are refused."""
    storage, scale = ((INT8, INT8), TOKEN_F16) if scaled else ((E4M3, E4M3), NONE)
    described = problem(head_dim, 16, storage, (scale, scale))
    spec = kernel_spec(described, "sm90", "sm_90a", DecodeConfig(tile_n, 2, 2, 1), partition="balanced")
    assert any("needs more registers" in reason for reason in supports(replace(spec, tile_n=2 * tile_n)))
    assert_no_spills(dump(spec, tmp_path)[1])
