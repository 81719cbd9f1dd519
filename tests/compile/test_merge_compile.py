"""Builds the merge of attention states for every target without a GPU and reads the machine code."""

import re
from pathlib import Path

import pytest
import torch

import cute_kernels as ck
from cute_kernels.compile import kernels as compiler
from cute_kernels.config.merge import MergeSpec, merge_supports
from cute_kernels.device.tracing.merge import build_merge
from cute_kernels.merge.variants import kernel_spec
from tests.support import machine_code

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def spec_of(target: str, dtype: str, head_dim: int, num_states: int, **changes: object) -> MergeSpec:
    return kernel_spec(ck.MergeStatesDescriptor(num_states, 64, 32, head_dim, DTYPES[dtype], **changes), target)


def dump(spec: MergeSpec, folder: Path) -> tuple[str, str]:
    """(PTX, SASS) of the kernel."""
    assert merge_supports(spec) == []
    return machine_code.dump(build_merge, spec, folder)


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "num_states", "changes"),
    [
        ("bf16", 128, 2, {}),
        ("f16", 64, 8, {}),
        ("bf16", 128, 33, {}),
        ("f32", 256, 8, {"lse_base": "2"}),
        ("f32", 5, 33, {}),
        ("f16", 1, 1, {}),
        ("bf16", 128, 3, {"alignment_bytes": 2}),
    ],
    ids=str,
)
def test_merge(dtype: str, head_dim: int, num_states: int, changes: dict, target: str, tmp_path: Path) -> None:
    """The loads of a chunk go out together, one a state and thread, and nothing goes to local memory."""
    spec = spec_of(target, dtype, head_dim, num_states, **changes)
    ptx, sass = dump(spec, tmp_path)
    assert f".target {target}" in ptx
    assert ("griddepcontrol.wait" in ptx) == (target == "sm_90a")
    bits = spec.columns * DTYPES[dtype].itemsize * 8
    loads = [found.start() for found in re.finditer(rf"ld\.global\.cs\.b{bits} ", ptx)]
    assert len(loads) == spec.in_flight
    assert max(loads) < ptx.index("ex2.approx"), "a load waits for an exponential"
    assert not re.search(r"\b(LDL|STL)\b", sass), "registers spilled to local memory"


def test_the_cache_serves_both_kinds_of_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_kernels", {})
    spec = spec_of("sm_90a", "bf16", 64, 2)
    kernel = compiler.compile_merge(spec)
    assert compiler.compile_merge(spec) is kernel and compiler.compiled_specs() == [spec]
    with pytest.raises(ck.Unsupported, match="columns"):
        compiler.compile_merge(MergeSpec("sm_90a", "bf16", 5, 2, 1, False, 1, "e"))
