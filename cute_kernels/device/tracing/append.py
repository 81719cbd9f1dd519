"""Traces and compiles an append to a paged cache."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from ...config.append import AppendSpec, angle_columns
from ..elements import ELEMENT_TYPES, stored_element
from ..kernels.append import AppendKernel
from .decode import fake_scale, fake_tables
from .fakes import compile_kernel, rows, scalars

INDEX_TYPES = {"i32": Int32, "i64": Int64}
ANGLE_BYTES = 4


def _rotary(spec: AppendSpec, tokens) -> tuple:
    """Fake q, q_out, cos_sin_cache and positions; None if the spec lacks one."""
    rotary = spec.rotary
    if rotary is None:
        return None, None, None, None
    queries = (None, None)
    if rotary.queries:
        heads = cute.sym_int64()
        queries = tuple(_incoming(spec, tokens, heads) for _ in range(2))
    vector = min(4, angle_columns(spec.columns, rotary.half))
    cos_sin_cache = rows(Float32, (cute.sym_int64(), rotary.rotary_dim), vector, ANGLE_BYTES * vector)
    return *queries, cos_sin_cache, scalars(INDEX_TYPES[rotary.position_type], (tokens,))


def _incoming(spec: AppendSpec, tokens, heads):
    """A fake tensor [tokens, heads, head_dim]."""
    dtype = ELEMENT_TYPES[spec.element_type]
    return rows(dtype, (tokens, heads, spec.head_dim), spec.columns, spec.columns * dtype.width // 8)


def arguments(spec: AppendSpec) -> tuple:
    """Fake arguments of AppendKernel for `spec`."""
    tokens, heads, pages = cute.sym_int64(), cute.sym_int64(), cute.sym_int64()
    inner = (spec.page_size, heads) if spec.nhd else (heads, spec.page_size)
    incoming = [_incoming(spec, tokens, heads) for _ in range(2)]
    elements = [stored_element(stored) for stored in (spec.k_type, spec.v_type)]
    caches = [rows(e, (pages, *inner, spec.head_dim), spec.columns, spec.columns * e.width // 8) for e in elements]
    slots = (scalars(INDEX_TYPES[spec.slot_type], (tokens,)), None, None)
    tables = slots if spec.table_format == "none" else fake_tables(spec.table_format, tokens)
    scales = fake_scale(spec.k_scale), fake_scale(spec.v_scale)
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return (*incoming, *caches, *tables, *scales, *_rotary(spec, tokens), Int64(0), stream)


def build_append(spec: AppendSpec, options: str = ""):
    """Compiles `spec` for its target; needs no GPU. `options` are further compiler options, such as --keep-ptx."""
    return compile_kernel(AppendKernel(spec), arguments(spec), spec.target, options)
