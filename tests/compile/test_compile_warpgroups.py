"""What warpgroups compile to: wgmma on whole tiles, in the background, without a spilled register."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels.attention.choice.heuristics import choose
from cute_kernels.attention.kernel_spec import kernel_spec
from cute_kernels.attention.variants import explain
from cute_kernels.config.decode import SMEM_BYTES
from cute_kernels.config.limits import supports
from cute_kernels.config.mixed import mixed_supports
from cute_kernels.device.attend import interleaved, widen
from cute_kernels.device.tracing.decode import build
from cute_kernels.device.tracing.mixed import build_mixed
from cute_kernels.planning.variants import PRETEND, PlanPreference
from tests.support import machine_code

E4M3 = {"kv_dtype": ck.KVDtype.E4M3}
INT8_TOKEN = {"kv_dtype": ck.KVDtype.INT8, "k_scale": ck.KVScale.TOKEN_F16, "v_scale": ck.KVScale.TOKEN_F16}
EVERYTHING = {"window_left": 100, "softcap": 20.0, "alibi": True, "sinks": True}
CASES: dict[str, dict[str, Any]] = {
    "64 rows": {},
    "128 rows": {"max_q_len": 32},
    "page 64": {"page_size": 64},
    "page 8": {"page_size": 8},
    "everything": EVERYTHING,
    "tree": {"tree_mask": True},
    "head_dim 64": {"head_dim": 64},
    "head_dim 96": {"head_dim": 96, "max_q_len": 32},
    "head_dim 256": {"head_dim": 256, "num_heads": 16},
    "71 heads of one": {"num_heads": 71, "num_kv_heads": 1, "max_q_len": 1, "query_format": "uniform", "head_dim": 64},
    "e4m3, 64 rows": E4M3,
    "e4m3, 128 rows": {**E4M3, "max_q_len": 32},
    "e4m3, 64 rows, uniform": {**E4M3, "query_format": "uniform"},
    "e4m3, 64 rows, uniform, tree": {**E4M3, "query_format": "uniform", "tree_mask": True},
    "int8 token, 64 rows": INT8_TOKEN,
    "int8 token, 128 rows": {**INT8_TOKEN, "max_q_len": 32},
}
CHOSEN = {"e4m3, 64 rows, uniform": (96, 8), "e4m3, 128 rows": (96, 8), "int8 token, 64 rows": (96, 8)}  # tiles, warps
SPILLS = {"e4m3, 64 rows, uniform": 2}  # loads and stores of spilled registers, outside the loop over tiles
# the same of kernels with two m-tiles a warp over e4m3, in the loop over tiles and in all; by
# head_dim, query
PAIRED_SPILLS = {(128, "uniform"): (0, 23), (128, "ragged"): (0, 16), (64, "uniform"): (0, 35)}


@pytest.mark.parametrize("name", CASES)
def test_warpgroups(name: str, tmp_path: Path) -> None:
    fields = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "max_q_len": 16, **CASES[name]}
    problem = ck.PagedAttentionDescriptor(8, q_dtype=torch.bfloat16, max_seq_len=8192, **fields).problem
    config = choose(problem, "sm90", "sm_90a", 132)
    assert config.mma == "warpgroup"
    if name in CHOSEN:
        assert (config.tile_n, config.num_warps) == CHOSEN[name]
    spec = kernel_spec(problem, "sm90", "sm_90a", config, partition="balanced")
    assert supports(spec) == []
    ptx, sass = machine_code.dump(build, spec, tmp_path)
    scores = rf"wgmma\.mma_async\.sync\.aligned\.m64n{spec.tile_n}k16\.f32\.{spec.k_math}"
    values = rf"wgmma\.mma_async\.sync\.aligned\.m64n{spec.padded_head_dim}k16\.f32\.{spec.v_math}"
    ends = 1 + spec.overlaps  # places with P V: in the loop, and of the last tile behind it
    steps = Counter({scores: spec.padded_head_dim // 16}) + Counter({values: ends * spec.tile_n // 16})
    assert {step: len(re.findall(step, ptx)) for step in steps} == steps
    assert "mma.sync" not in ptx
    loop = sass[sass.index("HGMMA") : sass.rindex("HGMMA")]
    assert not re.search(r"\b(LDL|STL)\b", loop), "registers spilled in the loop over tiles"
    assert len(re.findall(r"\b(?:LDL|STL)\b", sass)) <= SPILLS.get(name, 0), "registers spilled to local memory"
    assert sass.count("HGMMA") == spec.padded_head_dim // 16 + ends * spec.tile_n // 16
    assert sass.count("WARPGROUP.DEPBAR") == 2 * ends, "the assembler waits for more than both products"


CHUNKS = {"query_format": "uniform", "batch_size": 16, "max_q_len": 512, "max_seq_len": 1024}  # three warpgroups end first
LONG: dict[str, dict[str, Any]] = {
    "head_dim 64": {"head_dim": 64},
    "head_dim 96": {"head_dim": 96},
    "head_dim 128": {},
    "head_dim 192": {"head_dim": 192, "num_heads": 16},
    "head_dim 256": {"head_dim": 256, "num_heads": 16},
    "page 8, everything": {"page_size": 8, **EVERYTHING},
    "packed": {"page_size": None, "table_format": "packed"},
    "e4m3": E4M3,
    "int8 token": INT8_TOKEN,
    "int8 token, uniform": {**INT8_TOKEN, "query_format": "uniform"},
    "int8 token, chunks": {**INT8_TOKEN, **CHUNKS},
    "int8 token, chunks, head_dim 96": {**INT8_TOKEN, **CHUNKS, "head_dim": 96},
    "int8 token, chunks, head_dim 64": {**INT8_TOKEN, **CHUNKS, "head_dim": 64},
    "e4m3, head_dim 256": {**E4M3, "head_dim": 256, "num_heads": 16},
    "head_dim 64, soft cap": {"head_dim": 64, "softcap": 20.0},
    "head_dim 256, uniform": {"head_dim": 256, "num_heads": 16, "query_format": "uniform"},
}
# loads and stores of spilled registers where a phase, a piece or an item begins or ends
MIXED_SPILLS = {"head_dim 64": 21, "head_dim 256": 44}
# moves to uniform registers in the loops over tiles of both phases of warpgroups, nearly all of them in the first of the two
MOVES = {"head_dim 128": 41, "head_dim 64": 3, "head_dim 256": 80, "e4m3": 28, "int8 token": 25}
# the same of a phase as a kernel alone: three registers stored and loaded once an item. Those of int8 are of warps that have 48
# registers there and 56 in a mixed kernel
SPILLED = {"page 8, everything": 6, "int8 token": 15}


def registers_set(ptx: str) -> list[int]:
    """What warpgroups set their threads' registers to."""
    return sorted(int(count) for count in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", ptx))


@pytest.mark.parametrize("name", LONG)
def test_long_queries(name: str, tmp_path: Path) -> None:
    """Nothing spills in the loop over tiles, no product waits for the one before it, and producers hand registers over."""
    fields = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "max_q_len": 8192, "max_seq_len": 8192}
    problem = ck.PagedAttentionDescriptor(q_dtype=torch.bfloat16, **{"batch_size": 1, **fields, **LONG[name]}).problem
    chosen = explain(problem, PRETEND["h200"]).chosen
    spec = replace(chosen.phases[-1].spec if chosen.phases else chosen.spec, q_lens=None)
    assert spec.dealt and supports(spec) == []
    assert chosen.num_ctas == PRETEND["h200"].sm_count
    assert (spec.tile_n == 112) == (name in ("int8 token", "head_dim 192"))
    assert name not in ("e4m3", "int8 token, uniform") or (spec.tile_n == 96 and spec.holds_query)
    assert (spec.tile_n == 80) == (name == "head_dim 256, uniform" or name.startswith("int8 token, chunks, "))
    assert spec.one_crew == ("chunks" in name)
    ptx, sass = machine_code.dump(build, spec, tmp_path)
    assert len(re.findall(r"\b(?:LDL|STL)\b", sass)) <= SPILLED.get(name, 0), "registers spilled to local memory"
    assert sass.count("HGMMA") == spec.padded_head_dim // 16 + 2 * spec.tile_n // 16
    assert sass.count("WARPGROUP.DEPBAR") == 4, "the assembler waits for more than both products"
    if spec.k_type == "int8":  # four of these convert a load: of K and V the same ones, but where a crew is for both
        crew = widen.turns_of(spec.rings[0], 32 * len(spec.widening_crews[0]))
        assert sass.count("HFMA2.BF16") == (8 if spec.one_crew else 4) * crew
    assert registers_set(ptx) == sorted(spec.register_shares or ())
    if spec.interleaves_weights:  # all but the first group of columns wait, as the assembler does not know that they need not
        waiting = spec.tile_n // 2 - 4 * interleaved.GROUP
        assert len(re.findall(r"@P\d\s+MUFU\.EX2", sass)) >= waiting, "exponentials that wait for none"


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "q_len", "query"),
    [
        (32, 128, 8, "uniform"),
        (32, 64, 8, "uniform"),
        (32, 128, 5, "uniform"),
        (32, 128, 8, "ragged"),
        (64, 128, 4, "uniform"),
        (64, 128, 4, "ragged"),
        (128, 128, 2, "uniform"),
        (96, 128, 2, "uniform"),
    ],
)
@pytest.mark.parametrize("stored", [E4M3, INT8_TOKEN], ids=["e4m3", "int8 token"])
def test_two_m_tiles_of_eight_warps(
    stored: dict[str, Any], num_heads: int, head_dim: int, q_len: int, query: str, tmp_path: Path
) -> None:
    """Each warp converts a tile of 8 bits once for 32 packed rows, with registers that the other warps hand over.

    Those that store pieces beside the loop have 56 and spill some. Where registers spill, two masked branches in the loop reload
    the warp's number.
    """
    fields = {"num_heads": num_heads, "num_kv_heads": 8, "head_dim": head_dim, "page_size": 16, **stored}
    problem = ck.PagedAttentionDescriptor(
        64, q_dtype=torch.bfloat16, max_q_len=q_len, query_format=query, max_seq_len=8192, **fields
    ).problem
    spec = explain(problem, PRETEND["h200"]).chosen.spec
    assert (spec.warp_tiles, spec.readers, spec.turns, spec.num_warps) == (2, 1, 8, 8)
    ptx, sass = machine_code.dump(build, spec, tmp_path)
    spills = (0, 0) if spec.token_scales else PAIRED_SPILLS.get((head_dim, query), (0, 0))
    loop = sass[sass.index("HMMA") : sass.rindex("HMMA")]
    for code, most in zip((loop, sass), spills, strict=True):
        assert len(re.findall(r"\b(?:LDL|STL)\b", code)) <= most, "registers spilled to local memory"
    assert len(re.findall(r"\bHMMA", sass)) == 2 * 2 * (spec.tile_n // 8) * (head_dim // 16)
    assert len(re.findall(r"\bLDSM", sass)) == 2 * spec.tile_n * head_dim // 512
    assert registers_set(ptx) == ([40, 232] if spec.token_scales else [56, 56, 224]), "the finder has a branch of its own"


GATHERED: dict[str, dict[str, Any]] = {
    "page 1": {"page_size": 1},
    "page 5, head_dim 64": {"page_size": 5, "head_dim": 64},
    "page 1, head_dim 192": {"page_size": 1, "head_dim": 192, "num_heads": 16},
    "page 3, head_dim 256": {"page_size": 3, "head_dim": 256, "num_heads": 16},
}


@pytest.mark.parametrize("name", GATHERED)
def test_gathered_tiles(name: str, tmp_path: Path) -> None:
    """Pages below 8 tokens: cp.async by the producers in place of TMA, the same loop over tiles beside them, nothing spilled."""
    fields = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "max_q_len": 8192, **GATHERED[name]}
    spec = explain(ck.PagedAttentionDescriptor(1, q_dtype=torch.bfloat16, **fields).problem, PRETEND["h200"]).chosen.spec
    assert spec.gathers and supports(spec) == []
    ptx, sass = machine_code.dump(build, spec, tmp_path)
    assert "cp.async.bulk" not in ptx and "cp.async.cg" in ptx and "fence.proxy.async" in ptx
    assert not re.search(r"\b(LDL|STL)\b", sass), "registers spilled to local memory"
    assert sass.count("HGMMA") == spec.padded_head_dim // 16 + 2 * spec.tile_n // 16
    assert sass.count("WARPGROUP.DEPBAR") == 4, "the assembler waits for more than both products"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_blocks_on_sm80(head_dim: int, tmp_path: Path) -> None:
    """Two m-tiles a warp, one above head_dim 128, and one copy of each tile for all warps; some registers spill at 128."""
    fields = {"num_heads": 16, "num_kv_heads": 8, "head_dim": head_dim, "page_size": 16, "max_q_len": 8192}
    problem = ck.PagedAttentionDescriptor(1, q_dtype=torch.bfloat16, **fields).problem
    spec = explain(problem, PRETEND["h200"], PlanPreference(arch="sm80")).chosen.spec
    assert spec.shares_ring and supports(spec) == [] and 2 * spec.smem_bytes <= SMEM_BYTES["sm_90a"], "two CTAs an SM"
    _, sass = machine_code.dump(build, spec, tmp_path)
    steps = spec.warp_tiles * 2 * (spec.tile_n // 8) * (head_dim // 16)  # of Q K^T, and as many of P V
    assert len(re.findall(r"\bHMMA", sass)) == steps
    loop = re.search(r"BAR\.SYNC(?:(?!BAR\.SYNC).)*HMMA.*HMMA", sass, re.DOTALL)
    assert loop is not None and len(re.findall(r"\b(?:LDL|STL)\b", loop[0])) <= 8, "registers spilled in the loop over tiles"


@pytest.mark.parametrize("name", MOVES)
def test_mixed(name: str, tmp_path: Path) -> None:
    """One kernel of three phases: mma.sync for few query rows, wgmma for more; no product waits for the one before it."""
    fields = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "max_q_len": 8192, **LONG[name]}
    problem = ck.PagedAttentionDescriptor(8, q_dtype=torch.bfloat16, max_seq_len=8192, **fields).problem
    spec = explain(problem, PRETEND["h200"]).chosen.spec
    assert mixed_supports(spec) == [] and [phase.mma for phase in spec.phases] == ["warp", "warpgroup", "warpgroup"]
    _, sass = machine_code.dump(build_mixed, spec, tmp_path)
    depth = spec.many.padded_head_dim // 16
    steps = 2 * depth + 2 * spec.many.tile_n // 16 + (1 + spec.some.overlaps) * spec.some.tile_n // 16
    few = spec.few.tile_n // 8 * depth + spec.few.tile_n // 16 * spec.few.padded_head_dim // 8
    assert sass.count("HGMMA") == steps
    assert len(re.findall(r"\bHMMA", sass)) >= few
    assert sass.count("WARPGROUP.DEPBAR") == 4 + 2 * (1 + spec.some.overlaps)
    assert len(re.findall(r"\b(?:LDL|STL)\b", sass)) <= MIXED_SPILLS.get(name, 0), "registers spilled to local memory"
    inner = machine_code.loops(sass, "HG?MMA")
    assert len(inner) == 3 and not any(re.search(r"\b(?:LDL|STL)\b", loop) for loop in inner), "spilled in a loop over tiles"
    assert sum(loop.count("R2UR") for loop in inner if "HGMMA" in loop) <= MOVES[name], "what all lanes share is not known to be"
    made = [int(offset, 16) for offset in re.findall(r"SYNCS\.EXCH\.64 URZ, \[UR\d+\+0x([0-9a-f]+)\]", sass)]
    assert len(set(made)) == len(made) == sum(phase.barrier_count for phase in spec.phases)
    assert spec.union_bytes <= min(made) and max(made) + 8 <= spec.smem_bytes, "an mbarrier in memory that other phases use"


def test_a_workspace_for_some_phases_only() -> None:
    """Requests of few query rows stay whole on few SMs while others are cut: the kernel takes the workspace of those."""
    descriptor = ck.PagedAttentionDescriptor(5, 8, 2, 64, 16, torch.bfloat16, max_q_len=300, max_seq_len=1000)
    facts = PlanPreference(sm_count=1).part_of(PRETEND["h200"])
    spec = explain(descriptor.problem, facts).chosen.spec
    assert [phase.split for phase in spec.phases] == [False, True, False]
    build_mixed(spec)
