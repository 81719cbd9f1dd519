"""Named decode cases shared by the tests, and hostile inputs made from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

import cute_kernels as ck

INT_MAX = 2**31 - 1
INT_MIN = -(2**31)


@dataclass(frozen=True)
class Case:
    """A paged decode problem with its rows' lengths; spare_pages are pages of the pool that no table names."""

    name: str
    seq_lens: tuple[int, ...]
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    layout: Literal["HND", "NHD"] = "HND"
    table_format: Literal["dense", "csr"] = "dense"
    lse_base: Literal["e", "2"] = "e"
    softmax_scale: float | None = None
    spare_pages: int = 3

    @property
    def descriptor(self) -> ck.PagedDecodeDescriptor:
        """The descriptor of this case."""
        return ck.PagedDecodeDescriptor(
            len(self.seq_lens),
            self.num_heads,
            self.num_kv_heads,
            self.head_dim,
            self.page_size,
            self.dtype,
            layout=ck.KVLayout(self.layout),
            table_format=self.table_format,
            lse_base=self.lse_base,
            softmax_scale=self.softmax_scale,
        )

    def __str__(self) -> str:
        return self.name


class Inputs(NamedTuple):
    """Tensors of a case: caches in the case's layout, pages shuffled, everything beyond the rows' tokens poisoned."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    page_table: ck.PageTable


MIXED = (0, 1, 15, 16, 17, 33, 100)
CASES = (
    Case("gqa4_d64_p16", MIXED),
    Case("mha_d64_p16", MIXED, num_heads=4, num_kv_heads=4),
    Case("mqa_d128_p64", MIXED, num_heads=8, num_kv_heads=1, head_dim=128, page_size=64),
    Case("group5_d96_p8", MIXED, num_heads=10, num_kv_heads=2, head_dim=96, page_size=8),
    Case("page1", MIXED, page_size=1),
    Case("page5_d40", MIXED, page_size=5, head_dim=40),
    Case("page17_d7", MIXED, page_size=17, head_dim=7),
    Case("page256", MIXED, page_size=256),
    Case("d1", MIXED, head_dim=1),
    Case("d256", MIXED, head_dim=256),
    Case("nhd", MIXED, layout="NHD"),
    Case("csr", MIXED, table_format="csr"),
    Case("nhd_csr_f16", MIXED, layout="NHD", table_format="csr", dtype=torch.float16),
    Case("base2", MIXED, lse_base="2"),
    Case("scale", MIXED, softmax_scale=0.7),
    Case("f16", MIXED, dtype=torch.float16),
    Case("all_empty", (0, 0, 0)),
    Case("one_token", (1,)),
    Case("empty_first_last", (0, 40, 0)),
)


def make_inputs(case: Case, *, seed: int = 0, device: str = "cpu", poison: float = float("nan")) -> Inputs:
    """Random q and tokens; every slot that no row owns holds `poison`; table entries past a row's pages are garbage."""
    generator = torch.Generator().manual_seed(seed)
    pages = [-(-length // case.page_size) for length in case.seq_lens]
    pool = sum(pages) + case.spare_pages
    order = torch.randperm(pool, generator=generator).tolist()
    rows = [[order.pop() for _ in range(count)] for count in pages]
    shape = (pool, case.num_kv_heads, case.page_size, case.head_dim)
    k, v = (torch.randn(shape, generator=generator).to(case.dtype) for _ in range(2))
    owned = torch.zeros(pool, case.page_size, dtype=torch.bool)
    for row, length in zip(rows, case.seq_lens, strict=True):
        for i, page in enumerate(row):
            owned[page, : min(case.page_size, length - i * case.page_size)] = True
    foreign = ~owned[:, None, :, None]
    k, v = k.masked_fill(foreign, poison), v.masked_fill(foreign, poison)
    if case.layout == "NHD":
        k, v = (cache.transpose(1, 2).contiguous() for cache in (k, v))
    q = torch.randn(len(rows), case.num_heads, case.head_dim, generator=generator).to(case.dtype)
    return Inputs(q.to(device), k.to(device), v.to(device), page_table_of(case, rows, pool, device))


def page_table_of(case: Case, rows: list[list[int]], pool: int, device: str = "cpu") -> ck.PageTable:
    """The table of `rows`, each a list of page ids; the dense one is two columns wider than needed and ends in garbage."""

    def int32(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    if case.table_format == "csr":
        indptr = [0]
        for row in rows:
            indptr.append(indptr[-1] + len(row))
        last = [(length - 1) % case.page_size + 1 if length else 0 for length in case.seq_lens]
        return ck.PageTable.csr(int32(indptr), int32([page for row in rows for page in row]), int32(last))
    width = max(map(len, rows), default=0) + 2
    garbage = (-1, INT_MIN, INT_MAX, pool)
    table = [row + [garbage[(i + j) % 4] for j in range(width - len(row))] for i, row in enumerate(rows)]
    return ck.PageTable.dense(int32(table).view(len(rows), width), int32(case.seq_lens))
