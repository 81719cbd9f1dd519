"""Builds kernels of attention weights for every target without a GPU and reads the machine code."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import cute_kernels as ck
from cute_kernels.compile import kernels as compiler
from cute_kernels.config.weights import WeightsSpec, weights_supports
from cute_kernels.device.tracing.weights import build_weights
from cute_kernels.weights.variants import kernel_spec
from tests.support import machine_code

BF16, F16 = torch.bfloat16, torch.float16
E4M3, E5M2, INT8 = ck.KVDtype.E4M3, ck.KVDtype.E5M2, ck.KVDtype.INT8
HEAD, TOKEN, TOKEN_F16 = ck.KVScale.HEAD, ck.KVScale.TOKEN, ck.KVScale.TOKEN_F16
D = ck.AttentionWeightsDescriptor(64, 32, 8, 128, 16, BF16, 8192, mean=True, page_mass=True)
EVERYTHING = {"window_left": 40, "softcap": 3.0, "alibi": True}


def dump(spec: WeightsSpec, folder: Path) -> tuple[str, str]:
    """(PTX, SASS) of the kernel."""
    assert weights_supports(spec) == []
    return machine_code.dump(build_weights, spec, folder)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"weights_dtype": BF16},
        {"q_dtype": F16, "kv_dtype": E5M2, "k_scale": HEAD, "weights_dtype": F16},
        {"kv_dtype": E4M3},
        {"kv_dtype": INT8, "k_scale": TOKEN_F16},
        {"k_scale": TOKEN},
        {"head_dim": 256},
        {"num_kv_heads": 1},
        {"num_kv_heads": 32, "table_format": "csr", "page_size": 64},
        {"page_size": None, "table_format": "lengths", "page_mass": False},
        {"kv_dtype": INT8, "k_scale": TOKEN, **EVERYTHING},
        {"max_seq_len": 8191},
    ],
    ids=str,
)
def test_tma(changes: dict, tmp_path: Path) -> None:
    """K comes by TMA and goes to the tensor core; weights leave by the widest stores; nothing is read of V or spilled."""
    d = replace(D, **changes)
    ptx, sass = dump(kernel_spec(d, "sm90", "sm_90a", 132), tmp_path)
    assert ".target sm_90a" in ptx and "griddepcontrol.wait" in ptx
    assert "UTMALDG" in sass and re.search(r"HMMA\.16816\.F32(\.BF16)?", sass)
    assert ("HMMA.16816.F32.BF16" in sass) == (d.q_dtype == BF16 and d.problem.kv_dtype.element_bytes == 2)
    assert ("STG.E.128 " in sass) == (d.store_bytes == 16), "weights are not written 16 bytes at a time"
    assert not re.search(r"\b(LDL|STL)\b", sass), "registers spilled to local memory"
    assert not re.search(r"\b(RED|ATOMG?)\b", sass), "an atomic"


@pytest.mark.parametrize("target", ["sm_90a", "sm_80"])
@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 1},
        {"page_size": 5, "weights_dtype": BF16},
        {"kv_dtype": E4M3},
        {"kv_dtype": INT8, "k_scale": TOKEN_F16, **EVERYTHING},
        {"head_dim": 33, "weights_dtype": BF16},
        {"num_kv_heads": 1, "page_size": None, "table_format": "none", "page_mass": False},
    ],
    ids=str,
)
def test_cp_async(changes: dict, target: str, tmp_path: Path) -> None:
    ptx, sass = dump(kernel_spec(replace(D, **changes), "sm80", target, 132), tmp_path)
    assert f".target {target}" in ptx and ("griddepcontrol.wait" in ptx) == (target == "sm_90a")
    assert "UTMALDG" not in sass and ("LDGSTS" in sass) == ("head_dim" not in changes)
    assert not re.search(r"\b(LDL|STL)\b", sass), "registers spilled to local memory"
    assert not re.search(r"\b(RED|ATOMG?)\b", sass), "an atomic"


def test_what_is_not_asked_for_is_not_there(tmp_path: Path) -> None:
    """Weights alone have no sums over the heads; a mean alone no exchange of weights between lanes."""
    codes = [replace(D, page_mass=False, mean=False), replace(D, page_mass=False, weights_dtype=None)]
    alone, mean = (dump(kernel_spec(d, "sm90", "sm_90a", 132), tmp_path / str(i))[1] for i, d in enumerate(codes))
    butterflies = [len(re.findall(r"SHFL\.BFLY", code)) for code in (alone, mean)]
    assert butterflies == [8, 24]
    assert len(alone.splitlines()) > 200 and "STG.E.128 " in alone and "STG.E.128 " not in mean


def test_the_cache_serves_this_kind_of_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_kernels", {})
    spec = kernel_spec(D, "sm90", "sm_90a", 132)
    kernel = compiler.compile_weights(spec)
    assert compiler.compile_weights(spec) is kernel and compiler.compiled_specs() == [spec]
    with pytest.raises(ck.Unsupported, match="tile_n=16"):
        compiler.compile_weights(replace(spec, tile_n=16))
