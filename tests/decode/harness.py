"""One decode problem on real tensors: hostile memory, an f64 reference of its own, and the tolerance rule."""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F
from decode.storage import fill, make_scale, stored
from decode.tolerance import check_states
from torch.nn.attention import SDPBackend, sdpa_kernel

import cute_kernels as ck
from cute_kernels.attention.choice import tuned
from cute_kernels.config.decode import DecodeConfig

BACKENDS = [
    pytest.param("cpu", id="cpu"),
    pytest.param("sm90", id="sm90", marks=pytest.mark.gpu),
    pytest.param("sm80", id="sm80", marks=pytest.mark.gpu),
]
LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 257, 1000)
NAN = float("nan")


@dataclass(frozen=True)
class Shape:
    """heads, KV heads, head_dim, page_size (0: contiguous), the lengths of the rows, and what the caches store and how scaled."""

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


@dataclass
class Inputs:
    """Tensors of one problem. k and v are in HND dimension order; `rows[b]` are row b's pages, in order."""

    shape: Shape
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rows: list[torch.Tensor] = field(default_factory=list)
    beyond: int = -1  # what table entries past a row's pages hold
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None

    @property
    def scales(self) -> dict[str, torch.Tensor | None]:
        """What a plan's run is given of the scales."""
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}

    def table(self) -> ck.PageTable:
        """The page table in the shape's format, with two spare columns and hostile entries past each row's end."""
        device, lengths = self.q.device, self.shape.lengths
        if self.shape.table_format == "csr":
            counts = torch.tensor([0, *self.shape.pages], device=device)
            last = [(n - 1) % self.shape.page_size + 1 if n else 0 for n in lengths]
            return ck.PageTable.csr(counts.cumsum(0).int(), torch.cat(self.rows).int(), torch.tensor(last, device=device).int())
        table = torch.full((len(lengths), max(self.shape.pages, default=0) + 2), self.beyond, dtype=torch.int32, device=device)
        for row, pages in enumerate(self.rows):
            table[row, : len(pages)] = pages
        return ck.PageTable.dense(table, torch.tensor(lengths, dtype=torch.int32, device=device))

    def tokens(self, cache: torch.Tensor, row: int) -> torch.Tensor:
        """K or V of one row [num_kv_heads, length, head_dim]."""
        if not self.shape.page_size:
            return cache[row]
        pages = cache[self.rows[row].long()].transpose(0, 1)
        return pages.reshape(self.shape.num_kv_heads, -1, self.shape.head_dim)[:, : self.shape.lengths[row]]

    def real(self, name: str, row: int) -> torch.Tensor:
        """What "k" or "v" of one row stands for, f64 [num_kv_heads, length, head_dim]."""
        values, scale = self.tokens(getattr(self, name), row).double(), getattr(self, f"{name}_scale")
        return values if scale is None else values * self._row_scale(scale, getattr(self.shape, f"{name}_scale").granularity, row)

    def _row_scale(self, scale: torch.Tensor, granularity: str, row: int) -> torch.Tensor:
        """f64 scales that broadcast over [num_kv_heads, length, head_dim]."""
        if granularity == "token" and self.shape.page_size:
            heads = self.shape.num_kv_heads
            pages = scale.reshape(-1, self.shape.page_size, heads)[self.rows[row].long()]
            return pages.reshape(-1, heads)[: self.shape.lengths[row]].T.double()[..., None]
        return (scale[row][..., None] if granularity == "token" else scale.reshape(-1, 1, 1)).double()


def make_inputs(shape: Shape, device: str, seed: int = 0, dead: float | None = NAN, beyond: int = -1) -> Inputs:
    """Random inputs over shuffled pages. Slots past a row's end and pages of no row hold `dead` (None: random data)."""
    generator = torch.Generator(device).manual_seed(seed)
    batch, dim = len(shape.lengths), shape.head_dim

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(size, device=device, generator=generator).to(shape.dtype)

    q = normal(batch, shape.num_heads, dim)
    if not shape.page_size:
        size = (batch, shape.num_kv_heads, shape.lengths[0], dim)
        return store(Inputs(shape, q, normal(*size), normal(*size)), size[:3], seed)
    total = sum(shape.pages) + 3
    order = torch.randperm(total, device=device, generator=generator).int()
    rows = list(order[: sum(shape.pages)].split(shape.pages))
    inputs = Inputs(shape, q, *(normal(total, shape.num_kv_heads, shape.page_size, dim) for _ in range(2)), rows, beyond)
    inputs = store(inputs, (total, shape.page_size, shape.num_kv_heads), seed)
    if dead is not None:
        poison(inputs, dead)
    if shape.order == "NHD":
        inputs.k, inputs.v = (c.transpose(1, 2).contiguous().transpose(1, 2) for c in (inputs.k, inputs.v))
    return inputs


def store(inputs: Inputs, token_axes: tuple[int, ...], seed: int) -> Inputs:
    """The same with caches of the shape's dtypes, and with its scales; token_axes: the shape of those a token and KV head."""
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
    """Writes `dead` into every slot of both caches, and every token's scale, that no row's tokens occupy."""
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


def select(shape: Shape, backend: str, **preference: object) -> ck.PagedDecodePlan | ck.FlashDecodingPlan:
    """A plan forced onto `backend`."""
    plan = ck.PagedDecodePlan if shape.page_size else ck.FlashDecodingPlan
    return plan.select(shape.descriptor(), device_of(backend), ck.PlanPreference(arch=backend, **preference))


def select_forced(shape: Shape, config: DecodeConfig, **preference: object) -> ck.PagedDecodePlan | ck.FlashDecodingPlan:
    """A plan of the SM90 variant with this configuration, made anew: `select` would remember it."""
    plan = ck.PagedDecodePlan if shape.page_size else ck.FlashDecodingPlan
    with tuned.forced(config):
        made = plan(shape.descriptor(), torch.device("cuda", 0), ck.PlanPreference(arch="sm90", **preference))
    assert made.explain().chosen.config == config, made.explain()
    return made


def select_patched(
    monkeypatch: pytest.MonkeyPatch, owner: object, name: str, value: object, shape: Shape, backend: str, **preference: object
):
    """A plan whose kernel is compiled anew with another `owner.name`, and never read from disk or kept there."""
    with monkeypatch.context() as patch:
        patch.setenv("CUTE_KERNELS_CACHE", "off")
        patch.setattr("cute_kernels.compile.kernels._kernels", {})
        patch.setattr("cute_kernels.planning.base._plans", OrderedDict())
        patch.setattr(owner, name, value)
        return select(shape, backend, **preference)


def device_of(backend: str) -> str:
    return "cpu" if backend == "cpu" else "cuda"


def run(
    plan, inputs: Inputs, fill: float = NAN, table: ck.PageTable | None = None, concurrent: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Runs with every output prefilled with hostile values; waits for it, and finds the workspace clean, unless `concurrent`."""
    shape, q = inputs.shape, inputs.q
    out, lse = torch.full_like(q, fill), torch.full(q.shape[:2], fill, device=q.device)
    workspace = plan.new_workspace()
    caches = [c.transpose(1, 2) if shape.page_size and shape.order == "NHD" else c for c in (inputs.k, inputs.v)]
    tables = (table or inputs.table(),) if shape.page_size else ()
    plan.run(q, *caches, *tables, **inputs.scales, out=out, lse=lse, workspace=workspace)
    if not concurrent:
        assert not workspace.any(), "a launch leaves the workspace as it found it"
    return out, lse


def attend(inputs: Inputs, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(out f64, lse f64, out of same-dtype PyTorch) of one row, nothing shared with the package.

    8-bit and scaled caches: of what they stand for, rounded to q's dtype for PyTorch. Its math backend is the same on every
    device. The query heads of a KV head are its query rows, so that K and V are not copied for each.
    """
    shape = inputs.shape
    if not shape.lengths[row]:
        zero = torch.zeros_like(inputs.q[row])
        return zero.double(), torch.full(zero.shape[:1], -math.inf, dtype=torch.float64, device=zero.device), zero
    q, k = inputs.q[row].unflatten(0, (shape.num_kv_heads, -1)), inputs.real("k", row)
    logits = q.double() @ k.mT * shape.scale  # [num_kv_heads, group_size, length]
    k, v = k.to(shape.dtype), inputs.real("v", row)
    out, lse = torch.softmax(logits, -1) @ v, torch.logsumexp(logits, -1).flatten()
    with sdpa_kernel(SDPBackend.MATH):
        same = F.scaled_dot_product_attention(q[None], k[None], v[None].to(shape.dtype), scale=shape.scale)[0]
    return out.flatten(0, 1), lse / math.log(2) if shape.lse_base == "2" else lse, same.flatten(0, 1)


def assert_close(inputs: Inputs, out: torch.Tensor, lse: torch.Tensor, rows: list[int] | None = None) -> None:
    """Every head of every row, or of `rows`, is as near f64 as tolerance.py asks; heads of empty rows are (+0.0, -inf)."""
    rows = list(range(len(inputs.shape.lengths))) if rows is None else rows
    exact, exact_lse, same = (torch.stack(t) for t in zip(*(attend(inputs, row) for row in rows), strict=True))
    check_states((out[rows], lse[rows]), (exact, exact_lse), same, rows)


def assert_bitwise(got: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Equal bit for bit, out and lse."""
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
