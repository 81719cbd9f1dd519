"""Kernels of f32 without a GPU: six products of bf16 parts for each of a 16-bit kernel, and no spills in the loop.

And what a lane loads of V, from the layout of a tile and of the instruction's operands: each value once, at no bank twice.
"""

import re
from itertools import product
from pathlib import Path

import pytest
import torch

import cute_kernels as ck
from cute_kernels.attention.variants import explain
from cute_kernels.config.decode import KernelSpec
from cute_kernels.config.tiling import RingShape
from cute_kernels.device.attend.epilogue import value_column
from cute_kernels.device.attend.split_mma import TERMS, group_offset, lane_offset
from cute_kernels.device.tracing.decode import build
from cute_kernels.planning.variants import PRETEND
from tests.support import machine_code
from tests.support.specs import usual_spec

F32 = torch.float32


def decode(head_dim: int = 128, num_heads: int = 32, device: str = "h200", **preference: object) -> KernelSpec:
    descriptor = ck.PagedDecodeDescriptor(64, num_heads, 8, head_dim, 16, F32, max_seq_len=4096)
    return explain(descriptor.problem, PRETEND[device], ck.PlanPreference(**preference)).chosen.spec


def several(max_q_len: int, head_dim: int = 128, **masks: object) -> KernelSpec:
    heads = 32 if head_dim <= 128 else 16
    descriptor = ck.PagedAttentionDescriptor(
        batch_size=2, num_heads=heads, num_kv_heads=8, head_dim=head_dim, page_size=16, q_dtype=F32, max_q_len=max_q_len,
        max_seq_len=8192, causal="bottom_right", **masks,
    )  # fmt: skip
    return explain(descriptor.problem, PRETEND["h200"]).chosen.spec


SPECS = {
    "decode": decode(),
    "decode of 16 heads": decode(num_heads=128),
    "decode, d64": decode(64),
    "decode, d256": decode(256),
    "decode, sm80": decode(arch="sm80"),
    "decode on an A100": decode(device="a100"),
    "verify with all modifiers": several(4, window_left=100, softcap=3.0, alibi=True, sinks=True),
    "prefill": several(8192),
    "prefill, d192": several(8192, 192),
}
# values that the loop reads back from local memory once a tile, at most, and that it stores there: up to 128 columns none, but
# for one word of predicates where all modifiers meet
READ, STORED, READ_OF_WIDE, STORED_OF_WIDE = 4, {"verify with all modifiers": 1}, 24, 16


@pytest.mark.parametrize("name", SPECS)
def test_machine_code(name: str, tmp_path: Path) -> None:
    spec = SPECS[name]
    ptx, sass = machine_code.dump(build, spec, tmp_path)
    steps = spec.tile_n // 8 * spec.padded_head_dim // 16
    assert len(re.findall(r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16", ptx)) == 2 * steps * len(TERMS)
    assert len(re.findall(r"ldmatrix\S*\.x4\.", ptx)) == steps
    code = [line for line in sass.splitlines() if re.match(r"\s*/\*[0-9a-f]{4,}\*/", line)]
    products = [i for i, line in enumerate(code) if "HMMA" in line]
    assert len(products) == 2 * steps * len(TERMS)
    loop = "\n".join(code[products[0] : products[-1] + 1])
    read, stored = (len(re.findall(rf"\b{op}\b", loop)) for op in ("LDL", "STL"))
    wide = spec.padded_head_dim > 128
    assert read <= (READ_OF_WIDE if wide else READ)
    assert stored <= (STORED_OF_WIDE if wide else STORED.get(name, 0))


SHAPES = {
    "d64, a page a tile": {"head_dim": 64, "tile_n": 32, "page_size": 32},
    "d128, pages of 8": {"head_dim": 128, "tile_n": 16, "page_size": 8},
    "d128, pages of 16": {"head_dim": 128, "tile_n": 16, "page_size": 16},
    "d80": {"head_dim": 80, "tile_n": 16, "page_size": 8},
    "d16": {"head_dim": 16, "tile_n": 64, "page_size": 64},
    "d256, cp.async": {"head_dim": 256, "tile_n": 16, "page_size": 1, "arch": "sm80"},
}


def spec_of(name: str) -> KernelSpec:
    fields = SHAPES[name]
    return usual_spec(**fields, v_head_dim=fields["head_dim"], element_type="f32", k_type="f32", v_type="f32")


def address(shape: RingShape, token: int, byte: int) -> int:
    """Where a token's byte of a row is in a tile, as TMA's swizzle of 128 (or 64) bytes puts it: bits 4 up by bits 7 up."""
    row, bits = 2 * shape.column_block, {64: 7, 32: 3}[shape.column_block]
    slab, inside = divmod(token, shape.box_rows)
    flat = slab * shape.box_rows * 2 * shape.units + byte // row * shape.box_rows * row + inside * row + byte % row
    return flat ^ (flat >> 7 & bits) << 4


@pytest.mark.parametrize("name", SHAPES)
def test_a_warps_fragments_of_v_are_v(name: str) -> None:
    """P V by the operands' layout of m16n8k16, of what each lane loads and where the epilogue takes a column to be."""
    spec, generator = spec_of(name), torch.Generator().manual_seed(0)
    shape, width, tokens, columns = spec.rings[1], spec.value_columns, spec.tile_n, spec.padded_v_head_dim
    v, p = (torch.randn(size, generator=generator) for size in ((tokens, columns), (16, tokens)))
    memory = torch.full((shape.tile_bytes // 4,), float("nan"))
    for token, column in product(range(tokens), range(columns)):
        memory[address(shape, token, 4 * column) // 4] = v[token, column]
    out = torch.zeros(16, columns)
    for step, block in product(range(tokens // 16), range(columns // (8 * width))):
        loaded = {}  # of each lane, which of the four tokens and column: an element of V
        for lane, half, which in product(range(32), range(2), range(2)):
            at = lane_offset(shape, width, lane, which) + group_offset(shape, 2 * step + half, block)
            assert at % (4 * width) == 0
            loaded[lane, half, which] = memory[at // 4 : at // 4 + width]
        for n8 in range(width):
            b = torch.zeros(16, 8)
            for (lane, half, which), values in loaded.items():
                b[8 * half + 2 * (lane % 4) + which, lane // 4] = values[n8]
            place = [value_column(spec, 8 * (block * width + n8) + n) for n in range(8)]
            out[:, place] += p[:, 16 * step : 16 * step + 16] @ b
    assert torch.allclose(out, p @ v, atol=1e-4)


@pytest.mark.parametrize("name", [name for name, fields in SHAPES.items() if fields["head_dim"] % 32 == 0])
def test_no_bank_is_met_twice(name: str) -> None:
    """Each quarter of a warp, whose 16 bytes a lane are one access, reads all 32 banks."""
    spec = spec_of(name)
    for which, quarter in product(range(2), range(4)):
        lanes = range(8 * quarter, 8 * quarter + 8)
        starts = [lane_offset(spec.rings[1], spec.value_columns, lane, which) for lane in lanes]
        assert sorted(start // 4 % 32 + word for start in starts for word in range(4)) == list(range(32))
