"""Traces and compiles the merge of attention states."""

import cutlass.cute as cute
from cutlass import Float32
from cutlass.cute.runtime import make_fake_stream

from ...config.merge import MergeSpec
from ..elements import ELEMENT_TYPES
from ..kernels.merge import MergeStatesKernel
from .fakes import compile_kernel, rows, scalars


def arguments(spec: MergeSpec) -> tuple:
    """Fake arguments of MergeStatesKernel for `spec`."""
    dtype = ELEMENT_TYPES[spec.element_type]
    states, batch, heads = cute.sym_int64(), cute.sym_int64(), cute.sym_int64()
    align = spec.columns * dtype.width // 8
    outs = rows(dtype, (states, batch, heads, spec.head_dim), spec.columns, align)
    out = rows(dtype, (batch, heads, spec.head_dim), spec.columns, align)
    lses, lse = scalars(Float32, (states, batch, heads)), scalars(Float32, (batch, heads))
    sinks = scalars(Float32, (heads,)) if spec.sinks else None
    return outs, lses, out, lse, sinks, make_fake_stream(use_tvm_ffi_env_stream=True)


def build_merge(spec: MergeSpec, options: str = ""):
    """Compiles `spec` for its target; needs no GPU. `options` are further compiler options, such as --keep-ptx."""
    return compile_kernel(MergeStatesKernel(spec), arguments(spec), spec.target, options)
