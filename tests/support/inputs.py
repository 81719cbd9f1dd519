"""Decode problems on real tensors, in hostile memory: slots that no row owns hold poison, unread table entries hold garbage."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

import cute_kernels as ck
from tests.support.storage import fill, make_scale, stored

INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 257, 1000)
NAN = float("nan")
SPARE_PAGES = 3  # pages of the pool that no row owns


@dataclass(frozen=True)
class Shape:
    """heads, KV heads, head_dim, page_size (0: contiguous), the lengths of the rows, and the caches' stored types and scales.

    name: the shape's name in a parametrized test.
    """

    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 128
    page_size: int = 16
    lengths: tuple[int, ...] = LENGTHS
    dtype: torch.dtype = torch.bfloat16
    order: str = "HND"
    table_format: str = "dense"
    lse_base: str = "e"
    max_seq_len: int | None = None
    softmax_scale: float | None = None
    kv_dtype: ck.KVDtype | None = None
    v_dtype: ck.KVDtype | None = None
    k_scale: ck.KVScale = ck.KVScale.NONE
    v_scale: ck.KVScale = ck.KVScale.NONE
    name: str = field(default="", repr=False)

    def __str__(self) -> str:
        return self.name or repr(self)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def pages(self) -> list[int]:
        return [-(-length // self.page_size) for length in self.lengths]

    def descriptor(self) -> ck.PagedDecodeDescriptor | ck.FlashDecodingDescriptor:
        storage = {name: getattr(self, name) for name in ("kv_dtype", "v_dtype", "k_scale", "v_scale")}
        if not self.page_size:
            heads = (self.num_heads, self.num_kv_heads)
            descriptor = ck.FlashDecodingDescriptor.new_gqa(len(self.lengths), *heads, self.lengths[0], self.head_dim, self.dtype)
            return replace(descriptor, softmax_scale=self.softmax_scale, lse_base=self.lse_base, **storage)
        return ck.PagedDecodeDescriptor(
            batch_size=len(self.lengths),
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_size=self.page_size,
            q_dtype=self.dtype,
            layout=getattr(ck.KVLayout, self.order),
            table_format=self.table_format,
            max_seq_len=self.max_seq_len,
            softmax_scale=self.softmax_scale,
            lse_base=self.lse_base,
            **storage,
        )


MIXED = (0, 1, 15, 16, 17, 33, 100)
CASES = (
    Shape(name="gqa4_d64_p16", lengths=MIXED, head_dim=64),
    Shape(name="mha_d64_p16", lengths=MIXED, num_heads=4, num_kv_heads=4, head_dim=64),
    Shape(name="mqa_d128_p64", lengths=MIXED, num_heads=8, num_kv_heads=1, head_dim=128, page_size=64),
    Shape(name="group5_d96_p8", lengths=MIXED, num_heads=10, num_kv_heads=2, head_dim=96, page_size=8),
    Shape(name="page1", lengths=MIXED, page_size=1, head_dim=64),
    Shape(name="page5_d40", lengths=MIXED, page_size=5, head_dim=40),
    Shape(name="page17_d7", lengths=MIXED, page_size=17, head_dim=7),
    Shape(name="page256", lengths=MIXED, page_size=256, head_dim=64),
    Shape(name="d1", lengths=MIXED, head_dim=1),
    Shape(name="d256", lengths=MIXED, head_dim=256),
    Shape(name="nhd", lengths=MIXED, order="NHD", head_dim=64),
    Shape(name="csr", lengths=MIXED, table_format="csr", head_dim=64),
    Shape(name="nhd_csr_f16", lengths=MIXED, order="NHD", table_format="csr", dtype=torch.float16, head_dim=64),
    Shape(name="base2", lengths=MIXED, lse_base="2", head_dim=64),
    Shape(name="scale", lengths=MIXED, softmax_scale=0.7, head_dim=64),
    Shape(name="f16", lengths=MIXED, dtype=torch.float16, head_dim=64),
    Shape(name="all_empty", lengths=(0, 0, 0), head_dim=64),
    Shape(name="one_token", lengths=(1,), head_dim=64),
    Shape(name="empty_first_last", lengths=(0, 40, 0), head_dim=64),
)


class Operands(NamedTuple):
    """The operands of a run over pages, with caches in the shape's order."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: ck.PageTable


@dataclass
class Inputs:
    """Tensors of one problem. k and v are in HND dimension order; `rows[b]` are row b's pages, in order."""

    shape: Shape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rows: list[torch.Tensor] = field(default_factory=list)
    beyond: int | None = None  # the value of table entries past a row's pages; None: garbage of several kinds
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def scales(self) -> dict[str, torch.Tensor | None]:
        """The scale arguments of a plan's run."""
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}

    def caches(self) -> list[torch.Tensor]:
        """K and V in the shape's order."""
        nhd = self.shape.page_size and self.shape.order == "NHD"
        return [cache.transpose(1, 2) if nhd else cache for cache in (self.k, self.v)]

    def operands(self) -> Operands:
        """The operands of a run over pages."""
        return Operands(self.q, *self.caches(), self.table())

    def table(self) -> ck.PageTable:
        """The page table in the shape's format, with two spare columns and hostile entries past each row's end."""
        device, lengths = self.q.device, self.shape.lengths
        if self.shape.table_format == "csr":
            counts = torch.tensor([0, *self.shape.pages], device=device)
            last = [(n - 1) % self.shape.page_size + 1 if n else 0 for n in lengths]
            return ck.PageTable.csr(counts.cumsum(0).int(), torch.cat(self.rows).int(), torch.tensor(last, device=device).int())
        garbage = (-1, INT_MIN, INT_MAX, len(self.k)) if self.beyond is None else (self.beyond,)
        width = max(self.shape.pages, default=0) + 2
        rows = [[garbage[(row + i) % len(garbage)] for i in range(width)] for row in range(len(lengths))]
        table = torch.tensor(rows, dtype=torch.int32, device=device).view(len(lengths), width)
        for row, pages in enumerate(self.rows):
            table[row, : len(pages)] = pages
        return ck.PageTable.dense(table, torch.tensor(lengths, dtype=torch.int32, device=device))

    def tokens(self, cache: torch.Tensor, row: int) -> torch.Tensor:
        """One row's K or V as stored, [num_kv_heads, length, head_dim]."""
        if not self.shape.page_size:
            return cache[row]
        pages = cache[self.rows[row].long()].transpose(0, 1)
        return pages.reshape(self.shape.num_kv_heads, -1, self.shape.head_dim)[:, : self.shape.lengths[row]]

    def real(self, name: str, row: int) -> torch.Tensor:
        """The real values of one row's "k" or "v", f64 [num_kv_heads, length, head_dim]."""
        values, scale = self.tokens(getattr(self, name), row).double(), getattr(self, f"{name}_scale")
        return values if scale is None else values * self._row_scale(scale, getattr(self.shape, f"{name}_scale").granularity, row)

    def _row_scale(self, scale: torch.Tensor, granularity: str, row: int) -> torch.Tensor:
        """A row's scales, f64, in a shape that broadcasts over [num_kv_heads, length, head_dim]."""
        if granularity == "token" and self.shape.page_size:
            heads = self.shape.num_kv_heads
            pages = scale.reshape(-1, self.shape.page_size, heads)[self.rows[row].long()]
            return pages.reshape(-1, heads)[: self.shape.lengths[row]].T.double()[..., None]
        return (scale[row][..., None] if granularity == "token" else scale.reshape(-1, 1, 1)).double()


def make_inputs(shape: Shape, device: str, seed: int = 0, dead: float | None = NAN, beyond: int | None = None) -> Inputs:
    """Random inputs over shuffled pages. Slots past a row's end and pages of no row hold `dead` (None: random data)."""
    generator = torch.Generator(device).manual_seed(seed)
    batch, dim = len(shape.lengths), shape.head_dim

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, generator=generator).to(shape.dtype)

    q = normal(batch, shape.num_heads, dim)
    if not shape.page_size:
        size = (batch, shape.num_kv_heads, shape.lengths[0], dim)
        return store(Inputs(shape, q, normal(*size), normal(*size)), size[:3], seed)
    total = sum(shape.pages) + SPARE_PAGES
    order = torch.randperm(total, device=device, generator=generator).int()
    rows = list(order[: sum(shape.pages)].split(shape.pages))
    inputs = Inputs(shape, q, *(normal(total, shape.num_kv_heads, shape.page_size, dim) for _ in range(2)), rows, beyond)
    inputs = store(inputs, (total, shape.page_size, shape.num_kv_heads), seed)
    if dead is not None:
        poison(inputs, dead)
    if shape.order == "NHD":
        inputs.k, inputs.v = (c.transpose(1, 2).contiguous().transpose(1, 2) for c in (inputs.k, inputs.v))
    return inputs


def make_sinks(inputs: Inputs, logit: float) -> dict[int, torch.Tensor]:
    """Takes the values from each row's first token, and gives that token's keys alone a column 0.

    Returns, for each row that has tokens, column 0 of its queries, f64 [num_heads]: if their other columns are 0 and the softmax
    scale is 1, that token weighs e ** logit times as much as any other.
    """
    shape, found = inputs.shape, {}
    zero, high = (torch.full((), value, device=inputs.k.device).to(inputs.k.dtype) for value in (0.0, 64.0))
    for row, pages in enumerate(inputs.rows):
        if not shape.lengths[row]:
            continue
        for page in pages.tolist():
            inputs.k[page, :, :, 0] = zero
        first = int(pages[0])
        inputs.k[first, :, 0, 0] = high
        inputs.v[first, :, 0] = 0
        if inputs.v_scale is not None and inputs.v_scale.dim() == 3:
            inputs.v_scale[first, 0] = 2.0**-14
        found[row] = (logit / inputs.real("k", row)[:, 0, 0]).repeat_interleave(shape.num_heads // shape.num_kv_heads)
    return found


def make_operands(shape: Shape, seed: int = 0, dead: float = NAN) -> Operands:
    """The operands of a run over `make_inputs` on the CPU."""
    return make_inputs(shape, "cpu", seed, dead).operands()


def store(inputs: Inputs, token_axes: tuple[int, ...], seed: int) -> Inputs:
    """The inputs with caches in the shape's dtypes, and with its scales. token_axes: the shape of scales per token."""
    shape, device = inputs.shape, inputs.q.device
    k_dtype, v_dtype = shape.kv_dtype, shape.v_dtype or shape.kv_dtype
    k_scale = make_scale(shape.k_scale, k_dtype, token_axes, shape.num_kv_heads, 2 * seed + 1)
    v_scale = make_scale(shape.v_scale, v_dtype, token_axes, shape.num_kv_heads, 2 * seed + 2)
    return replace(
        inputs,
        k=stored(inputs.k, k_dtype, k_scale is not None),
        v=stored(inputs.v, v_dtype, v_scale is not None),
        k_scale=None if k_scale is None else k_scale.to(device),
        v_scale=None if v_scale is None else v_scale.to(device),
    )


def poison(inputs: Inputs, dead: float) -> None:
    """Writes `dead` to every slot of both caches that no row's tokens occupy, and to the scales per token of these slots."""
    shape = inputs.shape
    live = torch.zeros(inputs.k.shape[0], shape.page_size, dtype=torch.bool, device=inputs.k.device)
    for length, pages in zip(shape.lengths, inputs.rows, strict=True):
        full, rest = divmod(length, shape.page_size)
        live[pages[:full].long()] = True
        if rest:
            live[pages[full].long(), :rest] = True
    for cache in (inputs.k, inputs.v):
        fill(cache, ~live[:, None, :, None], dead)
    for scale in (inputs.k_scale, inputs.v_scale):
        if scale is not None and scale.dim() == 3:
            scale.masked_fill_(~live[..., None], dead)
