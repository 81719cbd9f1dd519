"""Traces and compiles the kernels of attention's backward."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ...config.backward import CHAIN_WORDS, BackwardSpec
from ..elements import ELEMENT_TYPES
from ..kernels.backward import BackwardKernel
from .decode import fake_cache, fake_tables
from .fakes import compile_kernel, rows, scalars


def arguments(spec: BackwardSpec) -> tuple:
    """Fake arguments of BackwardKernel for `spec`."""
    dtype = ELEMENT_TYPES[spec.element_type]
    batch, heads, kv_heads = cute.sym_int64(), cute.sym_int64(), cute.sym_int64()
    leading = {"uniform": (batch, cute.sym_int64()), "ragged": (cute.sym_int64(),)}[spec.query]
    dout, q, out, dq = (
        rows(dtype, (*leading, heads, spec.head_dim), spec.row_bytes // spec.q_bytes, spec.row_bytes) for _ in range(4)
    )
    pages = batch if spec.source == "contiguous" and spec.table_format != "packed" else cute.sym_int64()
    shape = (pages, kv_heads, spec.page_size or cute.sym_int64(), spec.head_dim)
    k, v, dk, dv = (fake_cache(spec, spec.element_type, shape) for _ in range(4))
    lse, delta = (scalars(Float32, (*leading, heads)) for _ in range(2))
    indptr = make_fake_tensor(Int32, (cute.sym_int64(),), (1,), assumed_align=4) if spec.query == "ragged" else None
    slopes = scalars(Float32, (heads,)) if spec.modifiers.alibi else None
    sinks, dsinks = (scalars(Float32, (heads,)) if spec.modifiers.sinks else None for _ in range(2))
    ranges = scalars(Int32, (batch, kv_heads)) if spec.lifts else None
    chains: tuple = (None, None, None)
    if spec.shared_pages:
        chains = (*(scalars(Int32, (count, cute.sym_int64())) for count in CHAIN_WORDS), scalars(Int32, (batch,)))
    tables = fake_tables(spec.table_format, batch)
    tensors = (dout, q, k, v, out, lse, *tables, indptr, slopes, sinks, dq, dk, dv, dsinks, delta, ranges, *chains)
    numbers = Float32(1.0), Int32(1), Int32(0), Int32(0), Float32(0.0), Int64(0)
    return (*tensors, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))


def build_backward(spec: BackwardSpec, options: str = ""):
    """Compiles `spec` for its target; needs no GPU. `options` are further compiler options, such as --keep-ptx."""
    return compile_kernel(BackwardKernel(spec), arguments(spec), spec.target, options)
