"""Builds kernels of attention's backward for every target without a GPU and reads the machine code."""

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cute_kernels as ck
from cute_kernels.backward.checks import Operands
from cute_kernels.backward.variants import kernel_spec
from cute_kernels.compile import kernels as compiler
from cute_kernels.config.backward import backward_supports
from cute_kernels.device.attend.split_mma import TERMS
from cute_kernels.device.kernels.backward import BackwardKernel
from cute_kernels.device.tracing.backward import arguments, build_backward
from tests.support import machine_code

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
A = ck.PagedAttentionDescriptor(4, 32, 8, 128, 64, BF16, 8192, num_pages=512, max_pages=128)
CONTIGUOUS = {"page_size": None, "num_pages": None, "max_pages": None, "table_format": "none", "query_format": "uniform"}
EVERYTHING = {"window_left": 40, "softcap": 3.0, "alibi": True, "sinks": True}
MOST_WAITS = 5  # that kernels ask for
TARGETS = [("sm90", "sm_90a"), ("sm80", "sm_80")]


def described(changes: dict) -> ck.PagedAttentionBackwardDescriptor:
    own = dict(changes)
    shared = own.pop("shared_pages", None)
    return ck.PagedAttentionBackwardDescriptor(replace(A, **own), shared_pages=shared)


def functions(sass: str) -> dict[str, str]:
    """The machine code of each kernel, by its name."""
    parts = re.split(r"\n\s*\.section\s+\.text\.", sass)[1:]
    return {re.match(r"kernel_cutlass_([a-z]+)", part).group(1): part for part in parts}  # type: ignore[union-attr]


@pytest.mark.parametrize(("arch", "target"), TARGETS)
@pytest.mark.parametrize(
    "changes",
    [
        CONTIGUOUS,
        {**CONTIGUOUS, "head_dim": 256},
        {"head_dim": 64, "q_dtype": F16, "kv_dtype": None},
        {"table_format": "csr", "page_size": 5, "head_dim": 96},
    ],
    ids=str,
)
def test_no_atomic_and_no_spill(changes: dict, arch: str, target: str, tmp_path: Path) -> None:
    """Products on the tensor core, operands by asynchronous copies; no sum in memory; nothing leaves the registers."""
    spec = kernel_spec(described(changes), arch, target)  # type: ignore[arg-type]
    assert backward_supports(spec) == []
    ptx, sass = machine_code.dump(build_backward, spec, tmp_path)
    assert f".target {target}" in ptx
    found = functions(sass)
    assert set(found) == {"queries", "keys"} | ({"chain"} if spec.shared_pages else set())
    for name, code in found.items():
        assert name == "chain" or "LDGSTS" in code
        if name != "chain" and arch == "sm90":
            assert code.count("HGMMA") >= 10 and "HMMA.16816" not in code.replace("HGMMA", "")
            assert spec.lifts or code.count("WARPGROUP.DEPBAR") <= MOST_WAITS, f"{name}: ptxas waits behind each wgmma"
        elif name != "chain":
            assert "HMMA.16816.F32" in code
        assert not re.search(r"\b(LDL|STL)\b", code), f"{name}: registers spilled to local memory"
        assert not re.search(r"\b(RED|ATOMG?)\.\S*F(16|32)", code), f"{name}: a floating-point atomic"
        assert spec.lifts or name == "chain" or not re.search(r"\b(RED|ATOMG?)\b", code), f"{name}: an atomic"


# instructions of a kernel that keep registers in local memory, at most: of 7,900 and of 11,700
SPILLS_OF_F32 = {128: 32, 256: 38}


@pytest.mark.parametrize("head_dim", SPILLS_OF_F32)
@pytest.mark.parametrize(("arch", "target"), TARGETS)
def test_f32_is_multiplied_in_parts(head_dim: int, arch: str, target: str, tmp_path: Path) -> None:
    """Six products of bf16 parts for each one, of warps on every architecture."""
    spec = kernel_spec(described({**CONTIGUOUS, "q_dtype": F32, "kv_dtype": None, "head_dim": head_dim}), arch, target)  # type: ignore[arg-type]
    assert backward_supports(spec) == [] and not spec.by_warpgroup
    _, sass = machine_code.dump(build_backward, spec, tmp_path)
    step = len(TERMS) * spec.tile_rows // 8 * head_dim // 16  # of S, of dP, and of each gradient
    found = functions(sass)
    assert found["queries"].count("HMMA.16816.F32.BF16") == 3 * step
    for code in found.values():
        assert len(re.findall(r"\b(?:LDL|STL)\b", code)) <= 2 * SPILLS_OF_F32[head_dim]
        assert not re.search(r"\b(RED|ATOMG?)\b", code), "an atomic"


def test_everything_at_once_compiles(tmp_path: Path) -> None:
    spec = kernel_spec(described(EVERYTHING), "sm90", "sm_90a")
    _, sass = machine_code.dump(build_backward, spec, tmp_path)
    assert set(functions(sass)) == {"chain", "queries", "keys", "sinks"}


def test_heads_past_128_columns_take_a_launch_for_each_gradient(tmp_path: Path) -> None:
    spec = kernel_spec(described({**CONTIGUOUS, "head_dim": 192}), "sm90", "sm_90a")
    _, sass = machine_code.dump(build_backward, spec, tmp_path)
    assert len(re.findall(r"\n\s*\.section\s+\.text\.kernel_cutlass_keys", sass)) == len(spec.passes) == 2


def test_a_launch_is_given_what_the_kernel_takes() -> None:
    """In this order: a run's operands but its workspace, what is in that, and the constants of the plan."""
    taken = list(inspect.signature(BackwardKernel.__call__).parameters)[1:-1]
    operands = [name.replace("_cache", "") for name in Operands._fields[:-1]]
    of_workspace = ["delta", "ranges", "pages", "nodes", "offsets"]
    constants = ["softmax_scale", "max_q_len", "window_left", "window_right", "softcap", "status"]
    assert taken == [*operands, *of_workspace, *constants]
    spec = kernel_spec(described({"q_dtype": F16, "kv_dtype": None, "sinks": True, "alibi": True}), "sm90", "sm_90a")
    assert len(arguments(spec)) == len(taken) + 1 and None not in arguments(spec)[:6]


def test_the_cache_serves_this_kind_of_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_kernels", {})
    spec = kernel_spec(described(CONTIGUOUS), "sm90", "sm_90a")
    kernel = compiler.compile_backward(spec)
    assert compiler.compile_backward(spec) is kernel and compiler.compiled_specs() == [spec]
    with pytest.raises(ck.Unsupported, match="tile_rows=24"):
        compiler.compile_backward(replace(spec, tile_rows=24))
