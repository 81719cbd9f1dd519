"""The shapes of GPU tests of 8-bit caches and scales: few that cover much, since each kernel takes seconds to compile.

PAIRS: any two values of any two axes meet in one of these shapes. SM80_PAIRS: half of PAIRS, with pages that TMA cannot serve:
the arithmetic is the same, and the way of K, V and their scales into shared memory, which differs, depends on fewer axes.
UNIFORM: shapes whose K and V are stored alike, with the shapes that they are compared with bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import cute_kernels as ck
from tests.support.harness import BACKENDS
from tests.support.inputs import Shape

E4M3, E5M2, INT8 = ck.KVDtype.E4M3, ck.KVDtype.E5M2, ck.KVDtype.INT8
NONE, TENSOR, HEAD, TOKEN, TOKEN_F16 = (getattr(ck.KVScale, name) for name in ("NONE", "TENSOR", "HEAD", "TOKEN", "TOKEN_F16"))
F16, BF16 = torch.float16, torch.bfloat16
SHORT = (0, 1, 17, 64, 129)

AXES = ("K's dtype", "V's dtype", "K's scale", "V's scale", "source", "page_size", "lse_base", "q", "head_dim", "group")
ROWS = (  # a greedy cover of all pairs, without 16-bit caches that have no scales; a dtype of None is q's
    (E5M2, E5M2, TOKEN_F16, TOKEN_F16, "csr", 64, "2", BF16, 64, 16),
    (INT8, E4M3, TOKEN_F16, TOKEN, "dense", 16, "e", F16, 128, 4),
    (E4M3, None, HEAD, NONE, "csr", 8, "2", F16, 256, 1),
    (None, INT8, NONE, NONE, "dense", 256, "e", BF16, 64, 1),
    (INT8, INT8, TOKEN, HEAD, "csr", 256, "2", BF16, 128, 4),
    (E5M2, E5M2, TOKEN, TENSOR, "dense", 8, "e", F16, 256, 16),
    (None, E4M3, NONE, TOKEN, "csr", 16, "2", BF16, 256, 16),
    (E4M3, None, TENSOR, TOKEN_F16, "dense", 64, "e", BF16, 128, 4),
    (None, E5M2, NONE, TOKEN_F16, "contiguous", 0, "2", F16, 128, 4),
    (E4M3, INT8, HEAD, TOKEN, "contiguous", 0, "e", F16, 64, 16),
    (E5M2, E4M3, TOKEN, NONE, "contiguous", 0, "e", BF16, 128, 1),
    (INT8, INT8, TOKEN_F16, TOKEN_F16, "dense", 64, "2", F16, 256, 1),
    (E4M3, None, NONE, HEAD, "csr", 16, "e", F16, 64, 1),
    (INT8, E4M3, NONE, TOKEN_F16, "csr", 8, "2", BF16, 64, 4),
    (E5M2, E5M2, HEAD, TOKEN, "csr", 256, "2", F16, 256, 4),
    (INT8, None, TOKEN_F16, NONE, "contiguous", 0, "e", BF16, 128, 16),
    (None, None, TOKEN, TOKEN, "csr", 64, "2", BF16, 64, 1),
    (E4M3, E4M3, TOKEN_F16, TENSOR, "dense", 256, "2", F16, 256, 16),
    (E4M3, E5M2, TOKEN, NONE, "dense", 16, "e", BF16, 256, 1),
    (None, E4M3, TENSOR, HEAD, "dense", 64, "2", F16, 64, 1),
    (None, INT8, TOKEN_F16, TOKEN, "csr", 8, "2", BF16, 128, 4),
    (E5M2, None, NONE, NONE, "csr", 64, "e", F16, 64, 4),
    (E5M2, INT8, TENSOR, TOKEN_F16, "dense", 16, "e", F16, 128, 1),
    (INT8, E5M2, HEAD, TENSOR, "contiguous", 0, "2", BF16, 256, 16),
    (E5M2, None, TOKEN, TOKEN_F16, "dense", 256, "2", F16, 64, 16),
)


def shape_of_row(index: int) -> Shape:
    """The shape of a row of ROWS; NHD and HND alternate."""
    k_dtype, v_dtype, k_scale, v_scale, source, page_size, lse_base, dtype, head_dim, group = ROWS[index]
    own = ck.KVDtype.F16 if dtype == F16 else ck.KVDtype.BF16
    return Shape(
        num_heads=2 * group,
        head_dim=head_dim,
        page_size=page_size,
        lengths=(129,) * 3 if source == "contiguous" else SHORT,
        dtype=dtype,
        order="HND" if source == "contiguous" or index % 2 else "NHD",
        table_format="csr" if source == "csr" else "dense",
        lse_base=lse_base,
        kv_dtype=k_dtype or own,
        v_dtype=v_dtype or own,
        k_scale=k_scale,
        v_scale=v_scale,
    )


PAIRS = tuple(map(shape_of_row, range(len(ROWS))))
SM80_PAIRS = tuple(replace(s, page_size={8: 1, 16: 5}.get(s.page_size, s.page_size)) for s in PAIRS[::2])


def uniform(kv_dtype: ck.KVDtype | None, k_scale: ck.KVScale, v_scale: ck.KVScale) -> Shape:
    """A shape with K and V of one dtype in NHD pages of 16 tokens, and bf16 queries."""
    return Shape(order="NHD", lengths=SHORT, kv_dtype=kv_dtype, k_scale=k_scale, v_scale=v_scale)


HEADS, TOKENS, POOL = uniform(E4M3, HEAD, HEAD), uniform(E4M3, TOKEN, TOKEN), uniform(INT8, TOKEN_F16, TOKEN_F16)
UNIFORM = (HEADS, TOKENS, POOL, uniform(INT8, TENSOR, TOKEN), uniform(E5M2, TOKEN_F16, HEAD), uniform(None, HEAD, TOKEN_F16))
UNIFORM_ON = {"sm90": UNIFORM, "sm80": (HEADS, TOKENS, POOL)}


def described(shape: Shape) -> str:
    """A shape's text in a test's name."""
    cache = f"{shape.table_format} page {shape.page_size} {shape.order}" if shape.page_size else "contiguous"
    k, v = ("16 bits" if d in (None, ck.KVDtype.F16, ck.KVDtype.BF16) else d.value for d in (shape.kv_dtype, shape.v_dtype))
    v = k if shape.v_dtype is None else v
    return f"{cache} d{shape.head_dim} {k} x {shape.k_scale}, {v} x {shape.v_scale}"


def arch_cases(on_cpu: object, by_arch: dict[str, tuple[Shape, ...]]) -> list:
    """(shape, backend) pairs: the shapes of `on_cpu` on the CPU, the shapes of `by_arch` on their GPU variants."""
    shapes = {"cpu": on_cpu, **by_arch}
    return [
        backend._replace(values=(shape, backend.id), id=f"{described(shape)}-{backend.id}")
        for backend in BACKENDS
        for shape in shapes[backend.id]
    ]
