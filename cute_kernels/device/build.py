"""Traces and compiles a decode kernel from fake tensors: shapes and strides are dynamic, so one kernel serves any cache."""

import warnings

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.base_dsl.ast_helpers import DSLOptimizationWarning
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ..config import ELEMENT_BYTES, KernelSpec
from .decode import DecodeKernel

ELEMENT_TYPES = {"f16": cutlass.Float16, "bf16": cutlass.BFloat16}


def _rows(dtype: type, shape: tuple, divisibility: int, align: int):
    """A tensor with a unit last stride and any other strides that are multiples of `divisibility` elements."""
    strides = tuple(cute.sym_int64(divisibility=divisibility) for _ in shape[:-1])
    return make_fake_tensor(dtype, shape, (*strides, 1), assumed_align=align)


def _tables(spec: KernelSpec) -> tuple:
    """Fake page table tensors: dense (table, seq_lens), csr (indices, indptr, last_page_len), or none."""

    def vector():
        return make_fake_tensor(Int32, (cute.sym_int64(),), (1,), assumed_align=4)

    if spec.table_format == "dense":
        return _rows(Int32, (cute.sym_int64(), cute.sym_int64()), 1, 4), vector(), None
    if spec.table_format == "csr":
        return vector(), vector(), vector()
    return None, None, None


def arguments(spec: KernelSpec) -> tuple:
    """Fake arguments of DecodeKernel for `spec`."""
    dtype = ELEMENT_TYPES[spec.element_type]
    batch, heads, kv_heads = cute.sym_int64(), cute.sym_int64(), cute.sym_int64()
    pair = 2 if spec.head_dim % 2 == 0 else 1
    query = [_rows(dtype, (batch, heads, spec.head_dim), pair, pair * ELEMENT_BYTES) for _ in range(2)]
    slots = spec.page_size or cute.sym_int64()
    pages = cute.sym_int64()
    caches = [
        _rows(dtype, (pages, kv_heads, slots, spec.head_dim), spec.vector_bytes // ELEMENT_BYTES, spec.vector_bytes)
        for _ in range(2)
    ]
    lse = make_fake_tensor(Float32, (batch, heads), (cute.sym_int64(), cute.sym_int64()), assumed_align=4)
    workspace = make_fake_tensor(cutlass.Uint8, (cute.sym_int64(),), (1,), assumed_align=16) if spec.split else None
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return (query[0], *caches, *_tables(spec), query[1], lse, workspace, Float32(1.0), Int32(1), Int32(1), stream)


def build(spec: KernelSpec, options: str = ""):
    """Compiles `spec` for its target; needs no GPU. `options` are further compiler options, such as --keep-ptx."""
    flags = f"--gpu-arch {spec.target} --enable-tvm-ffi {options}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DSLOptimizationWarning)  # fragments are unrolled on purpose
        return cute.compile(DecodeKernel(spec), *arguments(spec), options=flags)
