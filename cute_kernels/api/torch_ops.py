"""Attention, its backward, its weights, append and merge as torch ops: what a graph traced by torch.compile calls.

They write and return nothing.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .derived_plans import run_append, run_backward, run_merge, run_weights
from .plan_cache import run_attention, run_contiguous, run_paged

SCHEMAS = {
    "paged_decode": "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor table0, Tensor table1, Tensor? table2, "
    "Tensor? k_scale, Tensor? v_scale, Tensor(a!) out, Tensor(b!) lse, float? softmax_scale, str layout, str lse_base, "
    "int? max_seq_len, str? kv_dtype, Tensor? alibi_slopes=None, Tensor? sinks=None, int? window_left=None, "
    "float? softcap=None) -> ()",
    "flash_decoding": "(Tensor q, Tensor k, Tensor v, Tensor? k_scale, Tensor? v_scale, Tensor(a!) out, Tensor(b!) lse, "
    "float? softmax_scale, str lse_base, str? kv_dtype, Tensor? alibi_slopes=None, Tensor? sinks=None, "
    "int? window_left=None, float? softcap=None) -> ()",
    "paged_attention": "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? table0, Tensor? table1, Tensor? table2, "
    "Tensor? qo_indptr, Tensor? tree_mask, Tensor? alibi_slopes, Tensor? sinks, Tensor? k_scale, Tensor? v_scale, "
    "Tensor(a!) out, Tensor(b!) lse, str table_format, int? max_q_len, str? causal, int? window_left, int? window_right, "
    "float? softcap, float? softmax_scale, str layout, str lse_base, int? max_seq_len, str? kv_dtype) -> ()",
    "paged_attention_backward": "(Tensor dout, Tensor q, Tensor k_cache, Tensor v_cache, Tensor out, Tensor lse, "
    "Tensor? table0, Tensor? table1, Tensor? table2, Tensor? qo_indptr, Tensor? alibi_slopes, Tensor? sinks, Tensor(a!) dq, "
    "Tensor(b!) dk_cache, Tensor(c!) dv_cache, Tensor(d!)? dsinks, str table_format, int? max_q_len, str? causal, "
    "int? window_left, int? window_right, float? softcap, float? softmax_scale, str layout, str lse_base) -> ()",
    "append_kv": "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor table0, Tensor? table1, Tensor? table2, "
    "Tensor? k_scale, Tensor? v_scale, Tensor(c!)? k_scale_out, Tensor(d!)? v_scale_out, Tensor? q, Tensor(e!)? q_out, "
    "Tensor? cos_sin_cache, Tensor? positions, str layout, str pairing) -> ()",
    "attention_weights": "(Tensor q, Tensor k_cache, Tensor? table0, Tensor? table1, Tensor? table2, Tensor? k_scale, "
    "Tensor lse, Tensor? alibi_slopes, Tensor(a!)? weights, Tensor(b!)? mean, Tensor(c!)? page_mass, str table_format, "
    "int max_seq_len, int? window_left, float? softcap, float? softmax_scale, str layout, str lse_base, str? kv_dtype) -> ()",
    "merge_states": "(Tensor outs, Tensor lses, Tensor? sinks, Tensor(a!) out, Tensor(b!) lse, str lse_base) -> ()",
}
RUNS = {
    "paged_decode": partial(run_paged, traced=True),
    "flash_decoding": partial(run_contiguous, traced=True),
    "paged_attention": partial(run_attention, traced=True),
    "paged_attention_backward": partial(run_backward, traced=True),
    "append_kv": run_append,
    "attention_weights": run_weights,
    "merge_states": run_merge,
}
PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def traced(*operands: object) -> bool:
    """Whether a call must go through its torch op: something watches operations, or an operand has no memory."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return True
    return not PLAIN.issuperset(map(type, operands)) and any(isinstance(operand, FakeTensor) for operand in operands)


def _writes_only(*operands: object) -> None:
    """The shape function of an op that returns nothing."""


_library = torch.library.Library("cute_kernels", "DEF")  # `define` and `impl` dispatch in 2.5 us, `custom_op` in 25
for _name, _schema in SCHEMAS.items():
    _library.define(_name + _schema)
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, RUNS[_name], _key)
    torch.library.register_fake(f"cute_kernels::{_name}", _writes_only, lib=_library)

paged_decode = torch.ops.cute_kernels.paged_decode.default
flash_decoding = torch.ops.cute_kernels.flash_decoding.default
paged_attention = torch.ops.cute_kernels.paged_attention.default
paged_attention_backward = torch.ops.cute_kernels.paged_attention_backward.default
append_kv = torch.ops.cute_kernels.append_kv.default
attention_weights = torch.ops.cute_kernels.attention_weights.default
merge_states = torch.ops.cute_kernels.merge_states.default
