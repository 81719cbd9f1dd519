"""Traces and compiles a kernel of attention weights."""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream

from ...config.weights import WEIGHT_BYTES, WeightsSpec
from ..elements import ELEMENT_TYPES
from ..kernels.weights import WeightsKernel
from .decode import fake_cache, fake_scale, fake_tables
from .fakes import compile_kernel, rows, scalars


def arguments(spec: WeightsSpec) -> tuple:
    """Fake arguments of WeightsKernel for `spec`."""
    batch, heads, kv_heads = cute.sym_int64(), cute.sym_int64(), cute.sym_int64()
    pair = 2 if spec.head_dim % 2 == 0 else 1
    q = rows(ELEMENT_TYPES[spec.element_type], (batch, heads, spec.head_dim), pair, pair * spec.q_bytes)
    pages = batch if spec.source == "contiguous" else cute.sym_int64()
    k = fake_cache(spec, spec.k_type, (pages, kv_heads, spec.page_size or cute.sym_int64(), spec.head_dim))
    lse, slopes = scalars(Float32, (batch, heads)), scalars(Float32, (heads,)) if spec.modifiers.alibi else None
    keys, weights = cute.sym_int64(), None
    if spec.weights_type != "none":
        vector = spec.store_bytes // WEIGHT_BYTES[spec.weights_type]
        weights = rows(ELEMENT_TYPES[spec.weights_type], (batch, heads, keys), vector, spec.store_bytes)
    mean = scalars(Float32, (batch, keys)) if spec.mean else None
    page_mass = scalars(Float32, (batch, cute.sym_int64())) if spec.page_mass else None
    tensors = (q, k, *fake_tables(spec.table_format, batch), fake_scale(spec.k_scale), lse, slopes, weights, mean, page_mass)
    numbers = Float32(1.0), Int32(1), Int32(0), Float32(0.0), Int64(0)
    return (*tensors, *numbers, make_fake_stream(use_tvm_ffi_env_stream=True))


def build_weights(spec: WeightsSpec, options: str = ""):
    """Compiles `spec` for its target; needs no GPU. `options` are further compiler options, such as --keep-ptx."""
    return compile_kernel(WeightsKernel(spec), arguments(spec), spec.target, options)
