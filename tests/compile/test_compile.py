"""Builds every kernel class for its target without a GPU and reads the machine code: the promised instructions, no spills."""

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from cute_kernels.attention.choice.heuristics import choose
from cute_kernels.attention.descriptors import DecodeProblem
from cute_kernels.attention.kernel_spec import kernel_spec
from cute_kernels.config.decode import KernelSpec
from cute_kernels.config.limits import supports
from cute_kernels.config.problem import ElementType, Source, TableFormat
from cute_kernels.config.tiling import Arch, Target
from cute_kernels.device.tracing.decode import build
from cute_kernels.kv.types import KVDtype
from tests.support import machine_code

DTYPES = {"f16": (torch.float16, KVDtype.F16), "bf16": (torch.bfloat16, KVDtype.BF16)}
SOURCES: dict[str, tuple[Source, TableFormat, int]] = {
    "dense": ("paged", "dense", 16),
    "csr": ("paged", "csr", 64),
    "contiguous": ("contiguous", "none", 0),
}
KEPT = "st.relaxed.gpu.global.L2::cache_hint.b128"  # a store whose line L2 keeps


def spec_of(
    arch: Arch, target: Target, source: str, dtype: ElementType, head_dim: int, vector_bytes: int = 16, batch: int = 64, **changes
) -> KernelSpec:
    """What the heuristic builds for a batch of 8,192-token rows, 4 query heads to each of 8 KV heads, then `changes`."""
    kind, table_format, page_size = SOURCES[source]
    q_dtype, kv_dtype = DTYPES[dtype]
    problem = DecodeProblem(
        source=kind,
        batch_size=batch,
        num_heads=8 * changes.pop("group_size", 4),
        num_kv_heads=8,
        head_dim=head_dim,
        page_size=page_size,
        q_dtype=q_dtype,
        kv_dtype=kv_dtype,
        v_dtype=kv_dtype,
        table_format=table_format,
        vector_bytes=vector_bytes,
        max_seq_len=8192,
        lse_base="e",
    )
    return replace(kernel_spec(problem, arch, target, choose(problem, arch, target, 132), partition="balanced"), **changes)


def dump(spec: KernelSpec, folder: Path) -> tuple[str, str]:
    """(PTX, SASS) of the kernel."""
    assert supports(spec) == []
    return machine_code.dump(build, spec, folder)


def assert_no_spills(sass: str) -> None:
    assert re.search("HG?MMA", sass)
    assert not re.search(r"\b(LDL|STL)\b", sass), "registers spilled to local memory"


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_sm90(head_dim: int, source: str, dtype: ElementType, tmp_path: Path) -> None:
    spec = spec_of("sm90", "sm_90a", source, dtype, head_dim)
    ptx, sass = dump(spec, tmp_path)
    boxes = spec.tile_n // spec.box_rows
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.[45]d", ptx)) == 2 * boxes
    steps = spec.tile_n // 8 * head_dim // 16
    assert len(re.findall(rf"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.{dtype}", ptx)) == 2 * steps
    assert len(re.findall(r"ldmatrix\S*\.x4\.", ptx)) == steps
    assert_no_spills(sass)
    slow_paths = [m.start() for m in re.finditer(r"BRA\.DIV", sass)]  # of shuffles, where a warp is not taken to be converged
    assert len(slow_paths) <= {192: 8, 256: 5}.get(head_dim, 4)
    if head_dim <= 128:  # in the combine, once a launch: where lanes meet again, then its two steps
        assert all(start > sass.rindex("HMMA") for start in slow_paths)
    combine = ptx[ptx.rindex("ld.relaxed.gpu.global.b128") :]  # from the poll on, which lanes leave one by one
    assert combine.index("bar.warp.sync") < combine.index("shfl.sync.bfly"), "shuffles take their slow path"
    assert sass.index("UTMAPF") < sass.index("ACQBULK"), "what is asked for ahead waits for the kernel before"
    waits = [m.start() for m in re.finditer("ACQBULK", sass)]  # of the consumers, then of the producer
    assert len(waits) == 2
    assert "REDUX" in sass[waits[0] : waits[1]], "the share is found only after the wait"
    assert KEPT in combine, "L2 does not keep the workspace, for whose words CTAs poll"
    assert len(re.findall(r"barrier\.sync 2,", ptx)) == 2  # of consumers and producer, in two branches: not "bar.sync"


@pytest.mark.parametrize("target", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize(
    ("head_dim", "vector_bytes"), [(64, 16), (96, 16), (128, 16), (192, 16), (256, 16), (100, 8), (66, 4), (33, 2)]
)
def test_sm80(head_dim: int, vector_bytes: int, source: str, target: str, tmp_path: Path) -> None:
    spec = spec_of("sm80", target, source, "bf16", head_dim, vector_bytes, page_size=0 if source == "contiguous" else 1)
    ptx, sass = dump(spec, tmp_path)
    assert f".target {target}" in ptx
    assert "cp.async.bulk" not in ptx
    assert (KEPT in ptx) == (target == "sm_90a")  # whose encoding the policy has
    copies = len(re.findall(rf"cp\.async\.c[ag]\.shared\.global \[\S+\], \[\S+\], {vector_bytes},", ptx))
    assert (copies > 0) == (vector_bytes >= 4)
    assert "m16n8k16.row.col.f32.bf16" in ptx
    assert_no_spills(sass[sass.index("HMMA") : sass.rindex("HMMA") + 4])  # elsewhere ptxas trades a few for a third CTA an SM


@pytest.mark.parametrize(
    "changes",
    [
        {"partition": "whole"},
        {"partition": "invariant"},
        {"lse_base": "2"},
        {"group_size": 1},
        {"group_size": 5},
        {"group_size": 16},
        {"group_size": 128},
        {"batch": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("arch", ["sm90", "sm80"])
def test_other_pieces(arch: str, changes: dict, tmp_path: Path) -> None:
    spec = spec_of(arch, "sm_90a", "dense", "bf16", 128, **dict(changes))
    ptx, sass = dump(spec, tmp_path)
    assert ("ld.relaxed.gpu.global.b128" in ptx) == spec.split
    assert (KEPT in ptx) == (spec.partition == "balanced")  # only there CTAs wait for each other
    assert_no_spills(sass if arch == "sm90" else sass[sass.index("HMMA") : sass.rindex("HMMA") + 4])


def test_every_tile_that_supports_allows_keeps_its_registers(tmp_path: Path) -> None:
    """The largest tiles that `supports` accepts, with full rows."""
    for index, (head_dim, tile_n) in enumerate(product((64, 128, 192, 256), (16, 32, 64, 128))):
        spec = spec_of("sm90", "sm_90a", "dense", "bf16", head_dim, group_size=16, tile_n=tile_n, num_warps=2, num_stages=2)
        if not supports(spec):
            assert_no_spills(dump(spec, tmp_path / str(index))[1])
