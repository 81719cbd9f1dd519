"""Attention, its backward, its weights, append and merge as torch ops: what a graph traced by torch.compile calls.

Each op writes its outputs in place and returns nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import signature
from string import ascii_lowercase

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .derived_plans import run_append, run_backward, run_merge, run_weights
from .plan_cache import run_attention, run_contiguous, run_paged

# for each op, the function that it runs, whose parameters are the op's operands, and which of these it writes
OPS: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "paged_decode": (run_paged, ("out", "lse")),
    "flash_decoding": (run_contiguous, ("out", "lse")),
    "paged_attention": (run_attention, ("out", "lse")),
    "paged_attention_backward": (run_backward, ("dq", "dk_cache", "dv_cache", "dsinks")),
    "append_kv": (run_append, ("k_cache", "v_cache", "k_scale_out", "v_scale_out", "q_out")),
    "attention_weights": (run_weights, ("weights", "mean", "page_mass")),
    "merge_states": (run_merge, ("out", "lse")),
}
LITERALS = ("LseBase", "Pairing", "TableFormat")  # annotations whose values are strings
PLAIN = frozenset((Tensor, torch.nn.Parameter, type(None)))


def traced(*operands: object) -> bool:
    """Whether a call must go through its torch op: something watches operations, or an operand has no memory."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return True
    return not PLAIN.issuperset(map(type, operands)) and any(isinstance(operand, FakeTensor) for operand in operands)


def schema_of(run: Callable[..., None], written: tuple[str, ...]) -> str:
    """The schema of the op that runs a function, from its annotated parameters. `traced` is none of the op's operands."""
    letters, operands = iter(ascii_lowercase), []
    for name, parameter in signature(run).parameters.items():
        kind = "str" if parameter.annotation in LITERALS else parameter.annotation.replace(" | None", "?")
        if name in written:
            kind = kind.replace("Tensor", f"Tensor({next(letters)}!)")
        if name != "traced":
            operands.append(f"{kind} {name}" + ("" if parameter.default is parameter.empty else f"={parameter.default}"))
    return f"({', '.join(operands)}) -> ()"


def _writes_only(*operands: object) -> None:
    """The shape function of an op that returns nothing."""


_library = torch.library.Library("cute_kernels", "DEF")  # `define` and `impl` dispatch in 2.5 us, `custom_op` in 25
for _name, (_run, _written) in OPS.items():
    _library.define(_name + schema_of(_run, _written))
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, partial(_run, traced=True) if "traced" in signature(_run).parameters else _run, _key)
    torch.library.register_fake(f"cute_kernels::{_name}", _writes_only, lib=_library)

paged_decode = torch.ops.cute_kernels.paged_decode.default
flash_decoding = torch.ops.cute_kernels.flash_decoding.default
paged_attention = torch.ops.cute_kernels.paged_attention.default
paged_attention_backward = torch.ops.cute_kernels.paged_attention_backward.default
append_kv = torch.ops.cute_kernels.append_kv.default
attention_weights = torch.ops.cute_kernels.attention_weights.default
merge_states = torch.ops.cute_kernels.merge_states.default
