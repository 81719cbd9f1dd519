"""Page geometry and workspace layout: plain functions against worked numbers."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels.attention.descriptors import DecodeProblem
from cute_kernels.attention.kernel_spec import kept_requests_of, kernel_spec, units_of
from cute_kernels.attention.variants import explain
from cute_kernels.attention.workspace import workspace_bytes, workspace_regions
from cute_kernels.config.decode import KEPT_REQUESTS, MAX_BLOCKS, SLOTS, DecodeConfig, KernelSpec, grid_ctas
from cute_kernels.config.limits import supports
from cute_kernels.config.mixed import mixed_supports
from cute_kernels.config.problem import padded_head_dim
from cute_kernels.config.tiling import Arch
from cute_kernels.kv import geometry
from cute_kernels.planning.variants import PRETEND
from tests.support.specs import usual_spec


def test_block_and_page_bytes() -> None:
    assert geometry.block_bytes(128, 128, 2) == 65_536  # K and V of one page of one head
    assert geometry.page_stride_bytes(128, 128, 2) == 32_768
    assert geometry.block_bytes(16, 64, 4) == 8_192


def test_tma_box() -> None:
    box = geometry.tma_box(16, 128, 2, stride_bytes=(4096, 32_768))
    assert (box.num_dims, box.inner, box.outer, box.element_bytes, box.nbytes) == (2, 128, 16, 2, 4096)


@pytest.mark.parametrize(
    ("arguments", "error", "fragment"),
    [
        ((16, 100, 2), ck.MisalignedOperand, "200 bytes"),
        ((16, 128, 2, (4096, 8)), ck.MisalignedOperand, "stride_bytes = 8"),
        ((512, 128, 2), ck.InvalidProblem, "page_size = 512"),
        ((16, 257, 2), ck.InvalidProblem, "head_dim = 257"),
        ((0, 128, 2), ck.InvalidProblem, "page_size = 0"),
    ],
)
def test_tma_box_errors(arguments: tuple, error: type[Exception], fragment: str) -> None:
    with pytest.raises(error, match=fragment):
        geometry.tma_box(*arguments)


@pytest.mark.parametrize(("length", "pages"), [(0, 0), (1, 1), (128, 1), (129, 2), (4096, 32), (4097, 33)])
def test_pages_of_row(length: int, pages: int) -> None:
    assert geometry.pages_of_row(length, 128) == pages


def test_pages_of_row_rejects_a_negative_length() -> None:
    with pytest.raises(ck.InvalidProblem, match="seq_len = -1"):
        geometry.pages_of_row(-1, 128)


def test_group_size_and_threads() -> None:
    assert geometry.group_size(32, 8) == 4
    with pytest.raises(ck.InvalidProblem, match="num_heads = 30"):
        geometry.group_size(30, 8)
    assert geometry.threads("sm90", 4) == 192  # four consumer warps and two producers
    assert geometry.threads("sm80", 4) == 128


def test_smem_of_pages_and_queries() -> None:
    assert geometry.smem_bytes(16, 128, 2, 4) == 4 * 2 * 16 * 128 * 2 + 16 * 128 * 2
    for types, nbytes in ((("bf16", "bf16"), 2), (("f32", "f32"), 4)):
        q_type = "f32" if nbytes == 4 else "bf16"
        spec = usual_spec(element_type=q_type, k_type=types[0], v_type=types[1], tile_n=16, num_stages=4)
        least = geometry.smem_bytes(16, 128, nbytes, 4)
        assert least < spec.smem_bytes < 1.5 * least, "besides: a second query, the merge, barriers"


def test_workspace_of_a_fixed_number_of_splits() -> None:
    assert geometry.split_workspace_bytes(2, 8, 4, 64) == 2 * 8 * 4 * 66 * 4
    assert geometry.split_workspace_bytes(0, 8, 4, 64) == 0
    with pytest.raises(ck.InvalidProblem, match="num_splits = 0"):
        geometry.split_workspace_bytes(2, 8, 0, 64)


def spec_of(k_type: str, v_type: str, k_scale: str, v_scale: str) -> KernelSpec:
    """128 columns, 3 query heads a KV head, tiles of 64 tokens, 4 stages, 4 warps."""
    tiles = {"group_size": 3, "tile_n": 64, "num_stages": 4}
    return usual_spec(k_type=k_type, v_type=v_type, k_scale=k_scale, v_scale=v_scale, **tiles)


def test_smem_of_a_cta() -> None:
    queries, merge = 2 * 16 * 128 * 2, 4 * 3 * (128 + 16 + 2) * 4  # 4 warps, 3 query heads a KV head
    rest, tile = queries + merge + 4 * (2 * 8 + 4) + 512 + 1024, 64 * 128  # full and empty barriers, holes; pieces
    assert spec_of("bf16", "bf16", "none", "none").smem_bytes == 4 * tile * (2 + 2) + rest - 4 * 3 * 8 * 4  # padded less
    assert spec_of("e4m3", "e4m3", "head", "none").smem_bytes == 4 * tile * (1 + 1) + rest
    assert spec_of("bf16", "e5m2", "none", "none").smem_bytes == 4 * tile * (2 + 1) + rest
    scales = 4 * (64 * 4 + 8)  # a word a token, and two of flags, in each stage
    assert spec_of("int8", "int8", "token_f16", "token_f32").smem_bytes == 4 * tile * (1 + 1) + rest + 2 * scales


@pytest.mark.parametrize("num_warps", [1, 2, 4, 8])
def test_threads_of_a_combine_fit_into_the_merge_buffer(num_warps: int) -> None:
    """What they merge, 4 f32 of a pair, or of two where a state has more pairs than there are threads, may not reach past it."""
    for head_dim, group_size, (k_type, v_type) in product(range(16, 257, 16), range(1, 17), (("bf16", "bf16"), ("e4m3", "int8"))):
        spec = replace(
            spec_of(k_type, v_type, "none", "none"),
            head_dim=head_dim,
            v_head_dim=head_dim,
            group_size=group_size,
            num_warps=num_warps,
        )
        threads, pairs = 32 * num_warps, group_size * spec.padded_head_dim // 2
        assert spec.merge_floats >= 4 * threads * (1 if pairs <= threads else 2), spec


def test_padded_head_dim() -> None:
    assert [padded_head_dim(dim, 2) for dim in (1, 16, 40, 128)] == [16, 16, 48, 128]
    assert [padded_head_dim(dim, 4) for dim in (1, 16, 40, 128)] == [16, 16, 48, 128]
    assert [padded_head_dim(dim, 1) for dim in (1, 32, 40, 128)] == [32, 32, 64, 128]


def test_grid_ctas() -> None:
    assert grid_ctas(8, 132, 1) == 128
    assert grid_ctas(8, 132, 2) == 264
    assert grid_ctas(1, 132, 1) == 132
    assert grid_ctas(200, 132, 1) == 200  # every unit needs a CTA


def test_words_of_a_state() -> None:
    """16 bytes: of one query row two columns of 48, padded; of several four, and 8 bytes more for each four of these words."""
    problem = ck.PagedDecodeDescriptor(3, 6, 2, 40, 16, torch.float16).problem
    assert kernel_of(problem).state_words == 3 * 24
    several = ck.PagedAttentionDescriptor(3, 5, 1, 40, 16, q_dtype=torch.float16, max_q_len=4).problem
    spec = kernel_of(several)
    assert (spec.packed_rows, spec.state_words) == (32, 32 * 12 + 32 * 12 // 8)
    alone = replace(kernel_of(problem), group_size=71, mma="warpgroup", block_rows=128, num_warps=8)
    assert (alone.packed_rows, alone.state_words) == (71, 71 * 12 + 107), "the last 8 bytes of 107 words have no use"


def test_words_of_f16() -> None:
    """Of 32 rows and more with an output in bf16: eight columns, and 8 bytes more for each word, or for four by warpgroups."""
    problem = ck.PagedAttentionDescriptor(3, 8, 1, 128, 16, q_dtype=torch.bfloat16, max_q_len=4).problem
    spec = kernel_of(problem)
    assert (spec.packed_rows, spec.half_words, spec.row_words) == (32, True, 16)
    assert spec.state_words == 32 * 16 + 32 * 16 // 2
    together = replace(spec, mma="warpgroup", block_rows=64, num_warps=8)
    assert (together.half_words, together.state_words) == (True, 64 * 16 + 64 * 16 // 8)
    less = [{"element_type": "f16"}, {"block_rows": 16}, {"head_dim": 80, "v_head_dim": 80}, {"partition": "dealt"}]
    assert not any(replace(spec, **changes).half_words for changes in less)


def test_words_that_a_thread_sends_together() -> None:
    """The weights of a row's states are found once for them: all words that a thread has, up to four."""
    several = ck.PagedAttentionDescriptor(8, 8, 1, 128, 16, q_dtype=torch.bfloat16, max_q_len=2).problem
    spec = kernel_of(several)  # 16 rows of 32 words
    for num_warps, together in ((8, 2), (4, 4), (2, 4)):
        assert replace(spec, num_warps=num_warps).words_together == together
    assert replace(spec, head_dim=64, v_head_dim=64, num_warps=8).words_together == 1
    for head_dim, rows in product(range(16, 257, 16), (16, 32, 64, 128)):
        some = replace(spec, head_dim=head_dim, v_head_dim=head_dim, block_rows=rows)
        assert some.row_words % some.words_together == 0, some


def test_workspace_regions() -> None:
    problem = ck.PagedDecodeDescriptor(3, 6, 2, 40, 16, torch.float16).problem
    for partition, slots in (("balanced", 2), ("invariant", 2 * MAX_BLOCKS)):
        states, *others = workspace_regions(problem, 5, partition, 72)
        assert (states.name, states.offset, states.nbytes) == ("partial_states", 0, slots * 5 * 72 * 16)
        found = [(region.name, region.offset, region.nbytes) for region in others]
        assert found == ([("announcements", states.nbytes, 128)] if partition == "balanced" else [])  # 5 words, to a line's end
        assert workspace_bytes(problem, 0, partition, 72) == 0
    assert workspace_bytes(problem, 5, "balanced", 72) == 11_520 + 128  # a word of 4 bytes a CTA, rounded up
    assert workspace_bytes(problem, 5, "whole", 72) == 0
    (paired, _), (single, _) = (workspace_regions(problem, 5, "balanced", words) for words in (144, 72))
    assert paired.nbytes == 2 * single.nbytes


def kernel_of(problem: DecodeProblem, num_warps: int = 4, unit_heads: int = 1, arch: Arch = "sm90") -> KernelSpec:
    config = DecodeConfig(tile_n=32, num_stages=16, num_warps=num_warps, ctas_per_sm=1, unit_heads=unit_heads)
    return kernel_spec(problem, arch, "sm_90a", config, partition="balanced")


def test_units_of_one_query_row() -> None:
    """KV heads, one or two at a time, and m-tiles of 16 query heads."""
    decode = ck.PagedDecodeDescriptor(3, 6, 2, 64, 16, torch.float16).problem
    assert [units_of(decode, kernel_of(decode, unit_heads=heads)) for heads in (1, 2)] == [2, 1]
    wide = ck.PagedDecodeDescriptor(3, 71, 1, 64, 16, torch.float16).problem
    assert units_of(wide, kernel_of(wide)) == 5


@pytest.mark.parametrize(
    ("group", "max_q_len", "num_warps", "arch", "block_rows", "blocks", "readers"),
    [
        (4, 1, 4, "sm90", 8, 1, 1),  # half a tile is the least
        (4, 2, 4, "sm90", 8, 1, 1),
        (4, 3, 4, "sm90", 16, 1, 1),
        (4, 8, 4, "sm90", 32, 1, 1),  # a warp of four attends to two m-tiles
        (4, 8, 8, "sm90", 32, 1, 2),  # one of eight to one
        (4, 9, 4, "sm90", 64, 1, 2),
        (4, 16, 8, "sm90", 64, 1, 4),
        (4, 33, 4, "sm90", 128, 2, 4),
        (4, 33, 8, "sm90", 128, 2, 8),
        (8, 512, 4, "sm90", 128, 32, 4),
        (8, 16, 4, "sm80", 16, 8, 1),  # a warp of the cp.async mainloop has tiles of its own
    ],
)
def test_blocks_of_packed_rows(
    group: int, max_q_len: int, num_warps: int, arch: Arch, block_rows: int, blocks: int, readers: int
) -> None:
    """Packed rows are held by powers of two, as many m-tiles as the warps attend to; what does not fit takes further units."""
    problem = ck.PagedAttentionDescriptor(5, 2 * group, 2, 64, 16, torch.float16, max_q_len=max_q_len).problem
    spec = kernel_of(problem, num_warps, arch=arch)
    assert (spec.block_rows, spec.packed_rows, spec.many_blocks) == (block_rows, block_rows, blocks > 1)
    assert units_of(problem, spec) == 2 * blocks
    assert (spec.readers, spec.readers * spec.turns) == (readers, num_warps)
    assert supports(spec) == []


@pytest.mark.parametrize(
    ("group", "max_q_len", "num_warps", "block_rows", "packed_rows", "blocks", "readers"),
    [
        (4, 5, 8, 64, 64, 1, 4),  # a warpgroup has 64 rows, whatever a request needs
        (4, 16, 8, 64, 64, 1, 4),
        (4, 17, 8, 128, 128, 1, 8),  # two attend to one tile
        (4, 17, 4, 64, 64, 2, 4),
        (8, 512, 8, 128, 128, 32, 8),
        (40, 1, 8, 64, 40, 1, 4),  # of one query row no more than its heads
        (71, 1, 8, 128, 71, 1, 8),
        (200, 1, 8, 128, 128, 2, 8),
    ],
)
def test_blocks_of_warpgroups(
    group: int, max_q_len: int, num_warps: int, block_rows: int, packed_rows: int, blocks: int, readers: int
) -> None:
    """Packed rows are held by 64 rows of each warpgroup; four warps read what one multiplies."""
    form = {"query_format": "uniform"} if max_q_len == 1 else {}
    problem = ck.PagedAttentionDescriptor(5, 2 * group, 2, 64, 16, torch.float16, max_q_len=max_q_len, **form).problem
    config = DecodeConfig(tile_n=32, num_stages=16, num_warps=num_warps, ctas_per_sm=1, mma="warpgroup")
    spec = kernel_spec(problem, "sm90", "sm_90a", config, partition="balanced")
    assert (spec.block_rows, spec.packed_rows, spec.readers) == (block_rows, packed_rows, readers)
    assert spec.readers * spec.turns == num_warps
    assert units_of(problem, spec) == 2 * blocks
    assert spec.reread == (blocks > 1)
    assert supports(spec) == []


@pytest.mark.parametrize(
    ("max_q_len", "kv_dtype", "v_dtype", "v_scale", "mma", "bits"),
    [
        (64, ck.KVDtype.E4M3, None, None, "warpgroup", 11),  # two warpgroups, whose products overlap
        (16, ck.KVDtype.INT8, None, None, "warpgroup", 11),  # in turns
        (64, ck.KVDtype.INT8, None, ck.KVScale.TOKEN, "warpgroup", 11),  # V's scales go into V
        (64, ck.KVDtype.E4M3, None, ck.KVScale.TOKEN, "warpgroup", 12),
        (16, ck.KVDtype.INT8, None, ck.KVScale.TOKEN, "warpgroup", 12),
        (16, ck.KVDtype.E4M3, None, None, "warp", 11),  # 8 warps with two m-tiles each
        (16, ck.KVDtype.INT8, None, ck.KVScale.TOKEN, "warp", 14),  # their maxima are exact beside scales of V's tokens
        (4, ck.KVDtype.E4M3, None, None, "warp", 14),  # so are those of one m-tile
        (64, None, None, None, "warpgroup", 11),
        (16, None, None, None, "warpgroup", 14),  # in turns over 16 bits: products do not overlap
        (16, None, None, None, "warp", 14),
        (64, None, ck.KVDtype.E4M3, None, "warpgroup", 11),
        (64, ck.KVDtype.E4M3, ck.KVDtype.F16, None, "warpgroup", 11),
    ],
)
def test_bits_of_weights_in_f16(max_q_len: int, kv_dtype: Any, v_dtype: Any, v_scale: Any, mma: Any, bits: int) -> None:
    """Fewer where bases move lazily, but not beside scales of V's tokens."""
    stored = {"kv_dtype": kv_dtype, "v_dtype": v_dtype} | ({"v_scale": v_scale} if v_scale else {})
    problem = ck.PagedAttentionDescriptor(5, 8, 2, 64, 16, torch.float16, max_q_len=max_q_len, **stored).problem
    spec = kernel_spec(problem, "sm90", "sm_90a", DecodeConfig(64, 2, 8, 1, mma=mma), partition="balanced")
    assert spec.weight_bits == bits


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"arch": "sm80"}, "mma=warpgroup needs the TMA mainloop"),
        ({"block_rows": 32}, "block_rows=32 is not a multiple of the 64 rows"),
        ({"block_rows": 128, "num_warps": 4}, "the 8 m-tiles of block_rows=128 do not divide num_warps=4"),
        ({"unit_heads": 2}, "unit_heads=2 takes tensor-core steps of a warp"),
        ({"head_dim": 256, "k_type": "e4m3", "v_type": "e4m3"}, "head_dim=256 leaves a thread of 8 warps"),
        ({"partition": "dealt"}, "partition=dealt needs several query rows, and warpgroups that all attend"),
        ({"partition": "dealt", "k_type": "e4m3", "v_type": "e4m3"}, "partition=dealt needs several query rows, and warpgroups"),
    ],
)
def test_what_warpgroups_cannot_have(change: dict[str, Any], reason: str) -> None:
    problem = ck.PagedAttentionDescriptor(5, 8, 2, 64, 16, torch.float16, max_q_len=16).problem
    spec = kernel_spec(problem, "sm90", "sm_90a", DecodeConfig(32, 16, 8, 1, mma="warpgroup"), partition="balanced")
    assert supports(spec) == []
    assert any(text.startswith(reason) for text in supports(replace(spec, **change))), reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block_rows": 24}, "block_rows=24 is not 8 or a multiple of 16"),
        ({"block_rows": 48}, "the 3 m-tiles of block_rows=48 do not divide num_warps=4"),
        ({"block_rows": 256}, "the 16 m-tiles of block_rows=256 do not divide num_warps=4"),
        ({"block_rows": 64, "num_stages": 15}, "num_stages=15 is not a multiple of the 2 turns of its warps"),
        ({"unit_heads": 2}, "unit_heads=2 of several query rows take tokens' scales"),
        ({"arch": "sm80", "block_rows": 32}, "block_rows=32 on sm80 shares a ring between the warps: all of num_warps=4"),
    ],
)
def test_what_several_query_rows_cannot_have(change: dict[str, Any], reason: str) -> None:
    problem = ck.PagedAttentionDescriptor(5, 8, 2, 64, 16, torch.float16, max_q_len=4).problem
    assert any(text.startswith(reason) for text in supports(replace(kernel_of(problem), **change))), reason


@pytest.mark.parametrize(
    ("fields", "settles", "alike"),
    [
        ({"max_q_len": 16}, True, True),  # 64 packed rows: two warpgroups take turns
        ({"max_q_len": 32}, True, True),  # 128: both attend to every tile
        ({"max_q_len": 8192}, True, True),
        ({"max_q_len": 512, "max_seq_len": 1024}, False, False),  # short chunks: three do, and one crew widens for them
        ({"max_q_len": 8192, "query_format": "ragged"}, True, True),
        ({"max_q_len": 32, "v_dtype": ck.KVDtype.E4M3}, True, False),
        ({"max_q_len": 32, "k_scale": None, "v_scale": None}, False, True),
        ({"max_q_len": 8}, False, False),  # 32: warps convert in registers
    ],
)
def test_who_converts_scales_of_tokens(fields: dict[str, Any], settles: bool, alike: bool) -> None:
    """The warp that brings them, unless one crew widens both. Crews of K and V have the same code if they do the same."""
    given = {"query_format": "uniform", "k_scale": ck.KVScale.TOKEN_F16, "v_scale": ck.KVScale.TOKEN_F16, **fields}
    given = {name: value for name, value in given.items() if value is not None}
    shape = {"head_dim": 128, "page_size": 16, "max_seq_len": 8192, "kv_dtype": ck.KVDtype.INT8, **given}
    chosen = explain(ck.PagedAttentionDescriptor(64, 32, 8, q_dtype=torch.bfloat16, **shape).problem, PRETEND["h200"]).chosen
    spec = (chosen.phases or (chosen,))[-1].spec
    assert (spec.settles_scales, spec.widens_alike) == (settles, alike)


@pytest.mark.parametrize(
    ("rows", "form", "dtype", "nbytes"),
    [
        (64, ck.KVScale.TOKEN_F16, torch.bfloat16, (4, 2)),
        (64, ck.KVScale.TOKEN_F16, torch.float16, (4, 2)),
        (64, ck.KVScale.TOKEN, torch.bfloat16, (4, 4)),
        (128, ck.KVScale.TOKEN_F16, torch.bfloat16, (4, 2)),
        (128, ck.KVScale.TOKEN_F16, torch.float16, (4, 4)),  # V's scales go into V
        (2048, ck.KVScale.TOKEN_F16, torch.bfloat16, (4, 4)),  # three warpgroups
    ],
)
def test_bytes_of_scales_beside_widened_tiles(rows: int, form: ck.KVScale, dtype: torch.dtype, nbytes: tuple[int, int]) -> None:
    """V's f16 scales stay f16 where they multiply weights of one or two warpgroups; K's also hold the softmax factor: f32."""
    shape = {"head_dim": 128, "page_size": 16, "max_q_len": rows // 4, "query_format": "uniform", "kv_dtype": ck.KVDtype.INT8}
    scales = {"k_scale": form, "v_scale": form}
    problem = ck.PagedAttentionDescriptor(64, 32, 8, q_dtype=dtype, max_seq_len=1024, **scales, **shape).problem
    spec = explain(problem, PRETEND["h200"]).chosen.spec
    assert (spec.turns == 2, spec.wide_scale_bytes) == (rows == 64, nbytes)


@pytest.mark.parametrize(
    ("fields", "apart"),
    [
        ({}, True),
        ({"page_size": 64}, True),
        ({"page_size": 128}, False),  # a box is a whole tile
        ({"page_size": None, "table_format": "none"}, False),
        ({"page_size": 5}, False),  # gathered
        ({"kv_dtype": ck.KVDtype.E4M3}, False),
        ({"kv_dtype": ck.KVDtype.INT8, "k_scale": ck.KVScale.TOKEN_F16, "v_scale": ck.KVScale.TOKEN_F16}, False),
        ({"query_format": "ragged"}, False),  # a phase of a mixed kernel
        ({"max_q_len": 32, "max_seq_len": 65_536}, False),  # 128 rows of long rows: cut
    ],
)
def test_prompts_whose_values_have_a_producer(fields: dict[str, Any], apart: bool) -> None:
    """Then two producers take each item. Elsewhere, beside one that brings scales of tokens, or none."""
    shape = {"head_dim": 128, "page_size": 16, "max_q_len": 8192, "max_seq_len": 8192, "query_format": "uniform", **fields}
    chosen = explain(ck.PagedAttentionDescriptor(1, 32, 8, q_dtype=torch.bfloat16, **shape).problem, PRETEND["h200"]).chosen
    spec = (chosen.phases or (chosen,))[-1].spec
    assert spec.values_apart == apart
    assert spec.producers == spec.gatherers + (0 if spec.gathers else 1 + (apart or spec.token_scales > 0))


@pytest.mark.parametrize(
    ("fields", "tile_n", "rows"),
    [
        ({}, 96, 16),
        ({"page_size": 8}, 96, 8),
        ({"max_q_len": 32, "max_seq_len": 65_536}, 96, 16),  # 128 rows: both warpgroups attend to each tile
        ({"max_q_len": 16}, 96, 32),  # 64 rows: the warpgroups take tiles in turn
        ({"max_q_len": 2048, "max_seq_len": 2048, "batch_size": 4}, 64, 64),  # three warpgroups
        ({"q_dtype": torch.float16}, 112, 16),
        ({"k_scale": ck.KVScale.HEAD, "v_scale": ck.KVScale.HEAD}, 96, 32),
        ({"page_size": None, "table_format": "none"}, 96, 96),
    ],
)
def test_tokens_of_a_box_of_prompts_over_int8(fields: dict[str, Any], tile_n: int, rows: int) -> None:
    """Beside scales of tokens boxes are small where two warpgroups attend to the same tiles."""
    scales = {"k_scale": ck.KVScale.TOKEN_F16, "v_scale": ck.KVScale.TOKEN_F16}
    fixed = {"head_dim": 128, "max_seq_len": 8192, "query_format": "uniform", "kv_dtype": ck.KVDtype.INT8}
    shape = {**fixed, **scales, "page_size": 64, "max_q_len": 8192, "batch_size": 1, "q_dtype": torch.bfloat16, **fields}
    described = ck.PagedAttentionDescriptor(num_heads=32, num_kv_heads=8, **shape)
    spec = explain(described.problem, PRETEND["h200"]).chosen.spec
    assert (spec.tile_n, spec.box_rows) == (tile_n, rows)


@pytest.mark.parametrize(
    ("batch", "kept", "of_a_lane"),
    [(1, 1, 1), (2, 32, 1), (32, 32, 1), (33, 64, 2), (64, 64, 2), (65, 128, 4), (128, 128, 4), (4096, 128, 4)],
)
def test_requests_that_a_warp_keeps(batch: int, kept: int, of_a_lane: int) -> None:
    """The fewest that serve the batch; unless shares are balanced, the batch makes no other kernel."""
    assert kept_requests_of(batch, "balanced") == kept
    assert usual_spec(kept_requests=kept).lane_requests == of_a_lane
    assert usual_spec(kept_requests=kept).one_request == (batch == 1)
    assert {kept_requests_of(batch, other) for other in SLOTS if other != "balanced"} == {KEPT_REQUESTS[-1]}


def test_no_field_of_a_spec_hides_a_property() -> None:
    hidden = {field.name for field in fields(KernelSpec)} & {name for base in KernelSpec.__mro__ for name in properties(base)}
    assert not hidden


def properties(of: type) -> list[str]:
    return [name for name, value in vars(of).items() if isinstance(value, property)]


@pytest.mark.parametrize(("batch", "kv_heads", "phases"), [(8, 8, [16, 64, 128]), (4, 2, [16, 64])])
def test_phases_of_a_mixed_kernel_have_registers_for_all_warps(batch: int, kv_heads: int, phases: list[int]) -> None:
    """The last phase's shares of registers hold in all phases. With blocks of 64 rows it needs no other phase of that size."""
    fields = {"head_dim": 128, "page_size": 16, "max_seq_len": 1000, "max_q_len": 40, "kv_dtype": ck.KVDtype.E4M3}
    problem = ck.PagedAttentionDescriptor(batch, 4 * kv_heads, kv_heads, q_dtype=torch.bfloat16, **fields).problem
    spec = explain(problem, PRETEND["h200"]).chosen.spec
    assert [phase.block_rows for phase in spec.phases] == phases
    attending, others = spec.register_shares
    assert mixed_supports(spec) == []
    assert attending * spec.many.num_warps + others * (spec.warps - spec.many.num_warps) <= 2048
    fewer = replace(spec, some=spec.phases[-1], many=replace(spec.many, num_warps=4, block_rows=64))
    wider = replace(fewer, some=replace(fewer.some, num_warps=8, block_rows=64))
    assert not any("registers a lane" in reason for reason in mixed_supports(replace(fewer, some=None)))
    assert any("num_warps: 2560 registers a lane of 16 warps" in reason for reason in mixed_supports(wider))
