"""Append, merge and weights, executed without a GPU: every byte of an append, merged states and softmax weights against f64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels.append.variants import kernel_spec as append_spec
from cute_kernels.attention.operands import kernel_views
from cute_kernels.merge.variants import kernel_spec as merge_spec
from cute_kernels.weights.variants import kernel_spec as weights_spec
from tests.interpreted.machine.others import run_append, run_merge, run_weights
from tests.support import append_cases, merge_cases, weights_cases
from tests.support.inputs import NAN

K, S = ck.KVDtype, ck.KVScale
TOKENS, PAGES, HEADS = 21, 4, 3
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
APPENDS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "e4m3, a scale a head": {"kv_dtype": K.E4M3, "k_scale": S.HEAD, "v_scale": S.HEAD},
    "e5m2, one scale, f16": {"kv_dtype": K.E5M2, "k_scale": S.TENSOR, "v_scale": S.TENSOR, "dtype": F16, "head_dim": 80},
    "int8, scales of tokens": {"kv_dtype": K.INT8, "k_scale": S.TOKEN_F16, "v_scale": S.TOKEN, "layout": ck.KVLayout.NHD},
    "e4m3, odd columns": {"kv_dtype": K.E4M3, "head_dim": 5, "slot_dtype": torch.int32},
}
MERGES: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("sm_90a", {}),
    "f32, 33 states": ("sm_80", {"num_states": 33, "dtype": F32, "head_dim": 5, "lse_base": "2"}),
}


@pytest.mark.parametrize("arch", ["sm90", "sm80"])
@pytest.mark.parametrize("name", APPENDS)
def test_append(name: str, arch: Any) -> None:
    """An append is right byte for byte, and writes nothing else."""
    fields = {"head_dim": 64, "dtype": BF16, **APPENDS[name]}
    d = ck.KVAppendDescriptor(TOKENS, HEADS, fields.pop("head_dim"), 16, fields.pop("dtype"), **fields)
    spec = append_spec(d, arch, "sm_90a" if arch == "sm90" else "sm_80")
    k, v = append_cases.random_kv(d, TOKENS)
    slots = append_cases.random_slots(d, TOKENS, PAGES)
    memory = append_cases.fresh(d, PAGES)
    scales = append_cases.run_scales(d, memory, "cpu")
    pair = scales.get("k_scale"), scales.get("v_scale")
    run_append(spec, (k, v), (memory.k_cache, memory.v_cache), (slots, None, None), pair)
    memory.assert_equals(append_cases.expected(d, k, v, slots, PAGES))


@pytest.mark.parametrize("name", MERGES)
def test_merge(name: str) -> None:
    target, changes = MERGES[name]
    fields = {"num_states": 3, "batch_size": 4, "num_heads": 6, "head_dim": 64, "dtype": BF16, **changes}
    d = ck.MergeStatesDescriptor(**fields)
    outs, lses = merge_cases.make_states(d, "cpu")
    lses[1:, 0] = -torch.inf
    lses[:, 1, 2] = -torch.inf
    found = run_merge(merge_spec(d, target), outs, lses, None)
    merge_cases.assert_close(d, found, outs, lses)


SCORES = {"window_left": 40, "softcap": 3.0, "alibi": True}
WEIGHTS = {
    "sm90": weights_cases.case("tma", {"lengths": (0, 5, 33, 150)}),
    "sm80": weights_cases.case("int8", {"lengths": (0, 5, 129), "kv_dtype": K.INT8, "k_scale": S.TOKEN_F16}, SCORES, table="csr"),
}


@pytest.mark.parametrize("arch", WEIGHTS)
def test_weights(arch: Any) -> None:
    """Every weight, mean and page mass is right."""
    one = WEIGHTS[arch]
    inputs, d = weights_cases.make_weights(one), one.descriptor()
    spec = weights_spec(d, arch, "sm_90a" if arch == "sm90" else "sm_80", 4)
    given, cache = inputs.given, one.attention.cache
    shapes: Any = (
        d.k_scale.kernel_shape((("num_pages", -1), ("page_size", cache.page_size), ("num_kv_heads", cache.num_kv_heads))),
        (),
    )
    k, _, k_scale, _ = kernel_views(cache.order, shapes, given["k_cache"], given["k_cache"], given["k_scale"], None)  # type: ignore[arg-type]
    dtypes = {"weights": one.weights_dtype}
    made = [
        torch.full(d.shapes[name], NAN, dtype=dtypes.get(name, F32)) if name in d.shapes else None
        for name in ck.AttentionWeights._fields
    ]
    tensors = given["q"], k, inputs.attention.table.operands, k_scale, given["lse"], given.get("alibi_slopes")
    values = d.scale, one.keys, d.window_left or 0, float(d.softcap or 0.0)
    status = run_weights(spec, tensors, tuple(made), values)  # type: ignore[arg-type]
    assert not status.any()
    weights_cases.assert_close(inputs, ck.AttentionWeights(*made))
