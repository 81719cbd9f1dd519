"""Traces and compiles an append to a paged cache."""

import cutlass.cute as cute
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from ..append_spec import AppendSpec
from .append import AppendKernel
from .tracing import ELEMENT_TYPES, compile_kernel, rows, scalars, stored_element

SLOT_TYPES = {"i32": Int32, "i64": Int64}


def _scales(spec: AppendSpec, pages, heads) -> tuple:
    """Fake k_scale and v_scale."""
    if spec.scales == "none":
        return None, None
    shape = {"tensor": (1,), "head": (heads,), "token_dynamic": (pages, spec.page_size, heads)}[spec.scales]
    return tuple(scalars(ELEMENT_TYPES[spec.scale_type], shape) for _ in range(2))


def arguments(spec: AppendSpec) -> tuple:
    """Fake arguments of AppendKernel for `spec`."""
    dtype = ELEMENT_TYPES[spec.element_type]
    stored = stored_element(spec.stored_type)
    tokens, heads, pages = cute.sym_int64(), cute.sym_int64(), cute.sym_int64()
    inner = (spec.page_size, heads) if spec.nhd else (heads, spec.page_size)
    incoming = [rows(dtype, (tokens, heads, spec.head_dim), spec.columns, spec.columns * dtype.width // 8) for _ in range(2)]
    caches = [rows(stored, (pages, *inner, spec.head_dim), spec.columns, spec.columns * stored.width // 8) for _ in range(2)]
    slots = scalars(SLOT_TYPES[spec.slot_type], (tokens,))
    scales = _scales(spec, pages, heads)
    return (*incoming, *caches, slots, *scales, Int32(1), Int64(0), make_fake_stream(use_tvm_ffi_env_stream=True))


def build_append(spec: AppendSpec, options: str = ""):
    """Compiles `spec` for its target; needs no GPU. `options` are further compiler options, such as --keep-ptx."""
    return compile_kernel(AppendKernel(spec), arguments(spec), spec.target, options)
