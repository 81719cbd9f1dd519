"""Traces and compiles a decode kernel from fake tensors: shapes and strides are dynamic, so one kernel serves any cache."""

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor

from ...config.decode import KernelSpec
from ...config.problem import ELEMENT_BYTES, ScaleForm, StoredType, TableFormat
from ..attend.pack_gqa import word_columns
from ..elements import ELEMENT_TYPES, stored_element
from ..kernels.attention import AttentionKernel
from ..kernels.decode import DecodeKernel
from ..kernels.long_queries import LongQueryKernel
from .fakes import compile_kernel, rows, scalars


def fake_tables(table_format: TableFormat, batch) -> tuple:
    """Fake tables of `batch` rows: dense (table, seq_lens), csr (indices, indptr, last_page_len), one vector, or none."""

    def vector(extent):
        return make_fake_tensor(Int32, (extent,), (1,), assumed_align=4)

    if table_format == "dense":
        return rows(Int32, (batch, cute.sym_int64()), 1, 4), vector(batch), None
    if table_format == "csr":
        return vector(cute.sym_int64()), vector(cute.sym_int64()), vector(batch)
    if table_format == "lengths":
        return vector(batch), None, None
    if table_format == "packed":
        return vector(cute.sym_int64()), None, None
    return None, None, None


def fake_cache(spec: KernelSpec, stored_type: StoredType, shape: tuple):
    """A fake cache [pages, num_kv_heads, page_size, head_dim]."""
    return rows(stored_element(stored_type), shape, spec.vector_bytes // ELEMENT_BYTES[stored_type], spec.vector_bytes)


def fake_scale(form: ScaleForm):
    """A fake scale tensor of any strides, or None."""
    if form == "none":
        return None
    token = form.startswith("token")
    dtype = cutlass.Float16 if form == "token_f16" else Float32
    return scalars(dtype, tuple(cute.sym_int64() for _ in range(3 if token else 1)))


def arguments(spec: KernelSpec, takes_workspace: bool | None = None) -> tuple:
    """Fake arguments of the kernel for `spec`, or of one of which it is a phase. takes_workspace: by default if rows are cut."""
    takes_workspace = spec.split if takes_workspace is None else takes_workspace
    dtype = ELEMENT_TYPES[spec.element_type]
    batch, heads, kv_heads = cute.sym_int64(), cute.sym_int64(), cute.sym_int64()
    leading = {"one": (batch,), "uniform": (batch, cute.sym_int64()), "ragged": (cute.sym_int64(),)}[spec.query]
    pair, v_pair = (math.gcd(columns, word_columns(spec)) for columns in (spec.head_dim, spec.v_head_dim))
    q = rows(dtype, (*leading, heads, spec.head_dim), pair, pair * spec.q_bytes)
    out = rows(dtype, (*leading, heads, spec.v_head_dim), v_pair, v_pair * spec.q_bytes)
    slots = spec.page_size or cute.sym_int64()
    pages = batch if spec.source == "contiguous" and spec.table_format != "packed" else cute.sym_int64()
    stored = (spec.k_type, spec.head_dim), (spec.v_type, spec.v_head_dim)
    caches = [fake_cache(spec, stored_type, (pages, kv_heads, slots, columns)) for stored_type, columns in stored]
    scales = fake_scale(spec.k_scale), fake_scale(spec.v_scale)
    lse = scalars(Float32, (*leading, heads))
    workspace = make_fake_tensor(cutlass.Uint8, (cute.sym_int64(),), (1,), assumed_align=16) if takes_workspace else None
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    tensors = (q, *caches, *fake_tables(spec.table_format, batch), *scales, out, lse, workspace)
    if spec.plain:
        return (*tensors, Float32(1.0), Int32(1), Int64(0), stream)
    numbers = Float32(1.0), Int32(1), Int64(0), Int32(1), Int32(0), Int32(0), Float32(0.0)
    return (*tensors, *_further(spec, leading, heads), *numbers, stream)


def _further(spec: KernelSpec, leading: tuple, heads) -> tuple:
    """Fake qo_indptr, tree_mask, alibi_slopes and sinks, None where the spec has none."""
    indptr = make_fake_tensor(Int32, (cute.sym_int64(),), (1,), assumed_align=4) if spec.query == "ragged" else None
    tree_mask = scalars(Int32, (*leading, cute.sym_int64())) if spec.modifiers.tree_mask else None
    slopes = scalars(Float32, (heads,)) if spec.modifiers.alibi else None
    return indptr, tree_mask, slopes, scalars(Float32, (heads,)) if spec.modifiers.sinks else None


def build(spec: KernelSpec, options: str = ""):
    """Compiles `spec` for its target; needs no GPU. `options` are further compiler options, such as --keep-ptx."""
    kernel = DecodeKernel if spec.plain else LongQueryKernel if spec.dealt else AttentionKernel
    return compile_kernel(kernel(spec), arguments(spec), spec.target, options)
