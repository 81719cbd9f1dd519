"""Attention problems with several query rows per request: one table for every backend, and their tensors in hostile memory."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

import cute_kernels as ck
from tests.support.inputs import NAN, Inputs, Shape, make_inputs, make_sinks
from tests.support.storage import fill

LENGTHS = (0, 1, 5, 16, 33, 100, 257)
Q_LENS = (2, 3, 0, 1, 8, 5, 7)  # some are longer than their row of keys, one request has none
PADDING = 3  # rows of q that belong to no request
CONTIGUOUS = ("lengths", "packed", "none")
CACHE = Shape(lengths=LENGTHS, head_dim=64)


@dataclass(frozen=True)
class Case:
    """cache: heads, stored types and the rows' lengths. q_lens: query rows of each request. table: a PageTable's format.

    tma: whether the sm90 variant may serve the case. strided: uniform rows lie as [batch, num_heads, q_len, head_dim]. starts:
    the first query row of each request, if requests do not follow each other.
    """

    name: str
    cache: Shape = CACHE
    q_lens: tuple[int, ...] = Q_LENS
    max_q_len: int = 8
    uniform: bool = False
    strided: bool = False
    table: str = "dense"
    causal: str | None = "bottom_right"
    window_left: int | None = None
    window_right: int | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    tree: bool = False
    tma: bool = True
    starts: tuple[int, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def batch(self) -> int:
        return len(self.cache.lengths)

    @property
    def begins(self) -> list[int]:
        """The first query row of each request."""
        return list(self.starts or accumulate(self.q_lens, initial=0))[: self.batch]

    @property
    def words(self) -> int:
        return -(-self.max_q_len // 32)

    def descriptor(self) -> ck.PagedAttentionDescriptor:
        cache = self.cache
        return ck.PagedAttentionDescriptor(
            batch_size=self.batch,
            num_heads=cache.num_heads,
            num_kv_heads=cache.num_kv_heads,
            head_dim=cache.head_dim,
            page_size=None if self.table in CONTIGUOUS else cache.page_size,
            q_dtype=cache.dtype,
            max_q_len=self.max_q_len,
            query_format="uniform" if self.uniform else "ragged",
            layout=getattr(ck.KVLayout, cache.order),
            table_format=self.table,
            softmax_scale=cache.softmax_scale,
            lse_base=cache.lse_base,
            tree_mask=self.tree,
            **{name: getattr(cache, name) for name in ("kv_dtype", "v_dtype", "k_scale", "v_scale", "max_seq_len")},
            **{name: getattr(self, name) for name in ("causal", "window_left", "window_right", "softcap", "alibi", "sinks")},
        )


def case(name: str, cache: dict[str, Any] | None = None, **fields: Any) -> Case:
    """A case whose cache differs from the usual one by `cache`. The table's format goes into the cache, which makes tables."""
    made = Case(name, **fields)
    paged = made.table if made.table not in CONTIGUOUS else "dense"
    return replace(made, cache=replace(made.cache, table_format=paged, **(cache or {})))


E4M3, E5M2, INT8 = ck.KVDtype.E4M3, ck.KVDtype.E5M2, ck.KVDtype.INT8
TOKEN_SCALES = {"kv_dtype": INT8, "k_scale": ck.KVScale.TOKEN_F16, "v_scale": ck.KVScale.TOKEN_F16}
EVERYTHING = {"window_left": 40, "softcap": 3.0, "alibi": True, "sinks": True}
LONG = {"lengths": (3000, 64, 31, 700)}
ALONE = {"lengths": (3000,)}  # plans of one request have kernels of their own
UNIFORM = {"uniform": True, "q_lens": (4,) * len(LENGTHS), "max_q_len": 4}
VERIFY = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, **LONG}  # packed rows for warps, for one warpgroup, or for two
# on 16 SMs a CTA takes two KV heads of these
SHORT = {**VERIFY, "lengths": (1000, 64, 31, 700) * 3, "max_seq_len": 1024}
VERIFY_32, VERIFY_64, VERIFY_128 = (
    {"uniform": True, "q_lens": (rows // 4,) * 4, "max_q_len": rows // 4} for rows in (32, 64, 128)
)
BORDERS = [case(f"window_{w}", window_left=w) for w in (0, 1, 15, 16, 17, 31, 32, 100, 2**31 - 1)]
CASES = (
    case("causal"),
    case("top_left", causal="top_left"),
    case("no_mask", causal=None),
    *BORDERS,
    case("window_top_left", causal="top_left", window_left=3),
    case("window_both", causal=None, window_left=7, window_right=3),
    case("window_right_0", causal=None, window_right=0),
    case("window_right_4", causal=None, window_right=4),
    case("prefill_windows", {"lengths": (120, 90)}, q_lens=(99, 90), max_q_len=99, causal=None, window_left=17, window_right=16),
    case("softcap", softcap=2.0),
    case("alibi", alibi=True),
    case("alibi_no_mask", causal=None, alibi=True),
    case("sinks", sinks=True),
    case("everything", **EVERYTHING),
    case("everything_f16_base2", {"dtype": torch.float16, "lse_base": "2", "softmax_scale": 0.3}, **EVERYTHING),
    case("tree", tree=True),
    case("tree_2_words", {"lengths": (100, 40, 7, 0, 257)}, q_lens=(40, 33, 9, 5, 16), max_q_len=40, tree=True),
    case("tree_everything", tree=True, **EVERYTHING),
    case("uniform", **UNIFORM),
    case("uniform_strided", strided=True, **UNIFORM),
    case("uniform_fewer", **{**UNIFORM, "max_q_len": 9}, window_left=20, sinks=True),
    case("uniform_strided_everything", strided=True, **UNIFORM, **EVERYTHING),
    case("uniform_tree", strided=True, **UNIFORM, tree=True),
    case("one_row", **{**UNIFORM, "q_lens": (1,) * len(LENGTHS), "max_q_len": 1}),
    case("one_row_everything", **{**UNIFORM, "q_lens": (1,) * len(LENGTHS), "max_q_len": 1}, **EVERYTHING),
    case("one_row_top_left", **{**UNIFORM, "q_lens": (1,) * len(LENGTHS), "max_q_len": 1}, causal="top_left"),
    case("one_row_ragged", q_lens=(1, 0, 1, 1, 1, 0, 1), max_q_len=1, softcap=4.0),
    case("csr", table="csr"),
    case("csr_everything", table="csr", **EVERYTHING),
    case("nhd_p64", {"order": "NHD", "page_size": 64}, window_left=64),
    case("page_8", {"page_size": 8}, window_left=8),
    case("page_5_d40", {"page_size": 5, "head_dim": 40}, window_left=9, tma=False),
    case("page_1", {"page_size": 1}, window_left=9, tma=False),
    case("lengths", table="lengths"),
    case("lengths_nhd_everything", {"order": "NHD"}, table="lengths", **EVERYTHING),
    case("lengths_uniform", table="lengths", **UNIFORM, causal=None),
    case("lengths_one_row", table="lengths", **{**UNIFORM, "q_lens": (1,) * len(LENGTHS), "max_q_len": 1}),
    case("packed", table="packed"),
    case("packed_everything", table="packed", **EVERYTHING),
    case("packed_one_row", table="packed", **{**UNIFORM, "q_lens": (1,) * len(LENGTHS), "max_q_len": 1}),
    case("whole", {"lengths": (70,) * 4}, table="none", q_lens=(3, 0, 8, 70), max_q_len=70),
    case("whole_nhd_top_left", {"lengths": (70,) * 2, "order": "NHD"}, table="none", q_lens=(3, 8), causal="top_left"),
    case("e4m3", {"kv_dtype": E4M3}),
    case("e4m3_head_scales", {"kv_dtype": E4M3, "k_scale": ck.KVScale.HEAD, "v_scale": ck.KVScale.HEAD}, **EVERYTHING),
    case("e5m2_tensor_scales", {"kv_dtype": E5M2, "k_scale": ck.KVScale.TENSOR, "v_scale": ck.KVScale.TENSOR}, softcap=2.0),
    case("int8_token_scales", TOKEN_SCALES),
    case("int8_token_scales_everything", {**TOKEN_SCALES, "page_size": 64}, **EVERYTHING),
    case("int8_token_scales_lengths", TOKEN_SCALES, table="lengths", window_left=30),
    case("int8_token_scales_packed", TOKEN_SCALES, table="packed", sinks=True),
    case("k_bf16_v_e4m3", {"v_dtype": E4M3, "v_scale": ck.KVScale.TOKEN}, window_left=30),
    case("mha", {"num_heads": 4, "num_kv_heads": 4}, **EVERYTHING),
    case("mqa", {"num_heads": 8, "num_kv_heads": 1, "head_dim": 128}, **EVERYTHING),
    case("group_5_d96", {"num_heads": 10, "num_kv_heads": 2, "head_dim": 96}, **EVERYTHING),
    case("group_16", {"num_heads": 32, "num_kv_heads": 2}, sinks=True),
    case("group_32", {"num_heads": 32, "num_kv_heads": 1}, alibi=True),
    case("d256", {"head_dim": 256}, window_left=50),
    case("long", {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, **LONG}, q_lens=(4, 16, 2, 1), max_q_len=16),
    case("long_window", LONG, q_lens=(4, 16, 2, 1), max_q_len=16, **{**EVERYTHING, "window_left": 1023}),
    case("long_tree", LONG, q_lens=(32, 16, 31, 7), max_q_len=32, tree=True),
    case("prefill", {"lengths": (200, 130, 77)}, q_lens=(200, 130, 77), max_q_len=200),
    case("prefill_e4m3", {"lengths": (200, 130, 77), "kv_dtype": E4M3}, q_lens=(200, 130, 77), max_q_len=200),
    case("prefill_int8", {"lengths": (200, 130, 77), **TOKEN_SCALES}, q_lens=(200, 1, 77), max_q_len=200, **EVERYTHING),
    case("verify_32_e4m3", {**VERIFY, "kv_dtype": E4M3}, **VERIFY_32),
    case("verify_32_int8_everything", {**VERIFY, **TOKEN_SCALES, "head_dim": 64, "page_size": 64}, **VERIFY_32, **EVERYTHING),
    case("verify_32_e4m3_ragged", {**VERIFY, "kv_dtype": E4M3}, q_lens=(8, 5, 0, 3), max_q_len=8, sinks=True),
    case("two_kv_heads", {**SHORT, **TOKEN_SCALES}, q_lens=(8,) * 12, uniform=True),
    case("two_kv_heads_everything", {**SHORT, **TOKEN_SCALES, "head_dim": 64}, q_lens=(8, 5, 0, 3) * 3, **EVERYTHING),
    case("verify_64_e4m3", {**VERIFY, "kv_dtype": E4M3}, **VERIFY_64),
    case("verify_64_e4m3_everything", {**VERIFY, "kv_dtype": E4M3, "head_dim": 64, "page_size": 64}, **VERIFY_64, **EVERYTHING),
    case("verify_64_int8", {**VERIFY, **TOKEN_SCALES}, **VERIFY_64),
    case("verify_64_int8_f16", {**VERIFY, **TOKEN_SCALES, "dtype": torch.float16}, **VERIFY_64, sinks=True),
    case("verify_128_e4m3", {**VERIFY, "kv_dtype": E4M3}, **VERIFY_128, window_left=1023),
    case("verify_128_int8", {**VERIFY, **TOKEN_SCALES}, **VERIFY_128, sinks=True),
    case("verify_128_k_bf16_v_e4m3", {**VERIFY, "v_dtype": E4M3, "v_scale": ck.KVScale.TOKEN}, **VERIFY_128),
    case("verify_128_token_scales", {**VERIFY, "k_scale": ck.KVScale.TOKEN, "v_scale": ck.KVScale.TOKEN_F16}, **VERIFY_128),
    case("alone", {**VERIFY, **ALONE}, uniform=True, q_lens=(4,), max_q_len=4),
    case("alone_everything", ALONE, table="csr", q_lens=(5,), max_q_len=8, **EVERYTHING),
    case("alone_32_e4m3", {**VERIFY, **ALONE, "kv_dtype": E4M3}, uniform=True, q_lens=(8,), max_q_len=8),
    case("alone_32_int8", {**VERIFY, **ALONE, **TOKEN_SCALES}, q_lens=(7,), max_q_len=8, sinks=True),
    case("alone_64", {**VERIFY, **ALONE}, uniform=True, q_lens=(16,), max_q_len=16),
    case("alone_64_int8", {**VERIFY, **ALONE, **TOKEN_SCALES}, uniform=True, q_lens=(16,), max_q_len=16),
    case("alone_128_e4m3", {**VERIFY, **ALONE, "kv_dtype": E4M3}, q_lens=(31,), max_q_len=32, window_left=1023),
    case("alone_no_keys", {"lengths": (0,)}, q_lens=(3,), max_q_len=4, sinks=True),
    case("no_rows", q_lens=(0,) * len(LENGTHS)),
    case("no_keys", {"lengths": (0, 0)}, q_lens=(2, 3), sinks=True),
    case("no_keys_no_sinks", {"lengths": (0, 0)}, q_lens=(2, 3), softcap=1.0),
)  # fmt: skip

# q, caches and out in f32: units of 8 to 128 packed rows, at head_dims whose products, tiles and rings differ
F32: dict[str, Any] = {"dtype": torch.float32}
F32_CASES = (
    case("f32_prefill_d128", {"lengths": (300, 40, 129), "head_dim": 128, **F32}, q_lens=(300, 40, 129), max_q_len=300),
    case("f32_prefill_d192", {"lengths": (300, 40), "head_dim": 192, **F32}, q_lens=(300, 17), max_q_len=300, alibi=True),
    case("f32_prefill_d256", {"lengths": (300, 40), "head_dim": 256, **F32}, q_lens=(300, 40), max_q_len=300, sinks=True),
    case("f32_prefill_d80", {"lengths": (300, 40), "head_dim": 80, **F32}, q_lens=(70, 40), max_q_len=70, softcap=3.0),
    case("f32_everything", {"head_dim": 128, **F32}, **EVERYTHING),
    case("f32_rows_32", {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, **F32}, q_lens=(8, 8, 3, 0, 8, 1, 8)),
    case("f32_rows_64", {"head_dim": 128, "lengths": (3000, 64), **F32}, q_lens=(16, 9), max_q_len=16, window_left=99),
)


@dataclass
class AttentionInputs:
    """Tensors of a case. kv: the rows' keys and values in pages; k, v, table and scales: the same as a run is given them."""

    case: Case
    kv: Inputs
    q: Tensor
    k: Tensor
    v: Tensor
    table: ck.PageTable
    scales: dict[str, Tensor | None]
    extras: dict[str, Tensor] = field(default_factory=dict)

    @property
    def rows(self) -> Tensor:
        """q as [total_q, num_heads, head_dim]."""
        return self.q.flatten(0, 1) if self.case.uniform else self.q


def make_attention(case: Case, device: str = "cpu", seed: int = 0, dead: float = NAN) -> AttentionInputs:
    """Random inputs; slots of no key, padding rows of q and table entries past a row's end are poison or garbage."""
    kv = make_inputs(case.cache, device, seed, dead)
    generator = torch.Generator(device).manual_seed(seed + 1000)
    heads, dim, total = case.cache.num_heads, case.cache.head_dim, sum(case.q_lens)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=generator)

    if case.uniform:
        q = normal(case.batch, heads, case.q_lens[0], dim).to(case.cache.dtype).transpose(1, 2)
        q = q if case.strided else q.contiguous()
    else:
        q = normal(total + PADDING, heads, dim).to(case.cache.dtype)
        q[total:] = dead
    extras: dict[str, Tensor] = {}
    if not case.uniform:
        extras["qo_indptr"] = torch.tensor([*case.begins, total], dtype=torch.int32, device=device)
    if case.tree:
        rows = total + (0 if case.uniform else PADDING)
        words = torch.randint(-(2**31), 2**31, (rows, case.words), device=device, generator=generator)
        extras["tree_mask"] = words.int()
    if case.alibi:
        extras["alibi_slopes"] = torch.rand(heads, device=device, generator=generator)
    if case.sinks:
        extras["sinks"] = 2 * normal(heads)
    return AttentionInputs(case, kv, q, *stored(case, kv, dead), extras)


def make_sunk_attention(case: Case, device: str = "cpu", seed: int = 0) -> AttentionInputs:
    """make_attention over pages, but each row's first token has no values and weighs e ** 20 times as much as any other.

    The softmax scale must be 1.
    """
    inputs = make_attention(case, device, seed)
    inputs.rows[: sum(case.q_lens)].zero_()
    for row, column in make_sinks(inputs.kv, logit=20).items():
        inputs.rows[case.begins[row] : case.begins[row] + case.q_lens[row], :, 0] = column.to(inputs.q.dtype)
    return inputs


def make_low_attention(case: Case, device: str = "cpu", seed: int = 0) -> AttentionInputs:
    """make_attention over pages, but all scores are below zero, and rise from page to page: maxima move, and never above zero."""
    inputs = make_attention(case, device, seed)
    inputs.rows[: sum(case.q_lens)] *= 0.002
    inputs.rows[: sum(case.q_lens), :, 0] = -8.0
    for pages in inputs.kv.rows:
        for place, page in enumerate(pages.tolist()):
            inputs.kv.k[page, :, :, 0] = torch.tensor(64 - 56 * place / len(pages)).to(inputs.kv.k.dtype)
    return inputs


def stored(case: Case, kv: Inputs, dead: float) -> tuple[Tensor, Tensor, ck.PageTable, dict[str, Tensor | None]]:
    """(K, V, page table, scales) as a run of the case is given them: the pages, or the same tokens in a contiguous cache."""
    lengths = torch.tensor(case.cache.lengths, dtype=torch.int32, device=kv.q.device)
    if case.table not in CONTIGUOUS:
        return *kv.caches(), kv.table(), kv.scales
    if case.table == "packed":
        table = ck.PageTable.packed(torch.cat([lengths.new_zeros(1), lengths.cumsum(0).int()]))
        k, v = (torch.cat([kv.tokens(t, b).transpose(0, 1) for b in range(case.batch)]) for t in (kv.k, kv.v))
        scales = {name: None if scale is None else _packed_scale(kv, scale) for name, scale in kv.scales.items()}
        return k, v, table, scales
    longest = max(case.cache.lengths) + (0 if case.table == "none" else 5)
    table = ck.PageTable.whole() if case.table == "none" else ck.PageTable.lengths(lengths)
    k, v = (_side_by_side(kv, t, longest, dead) for t in (kv.k, kv.v))
    if case.cache.order == "NHD":
        k, v = (t.transpose(1, 2).contiguous() for t in (k, v))
    return k, v, table, {name: _side_by_side_scale(kv, scale, longest, dead) for name, scale in kv.scales.items()}


def _token_scale(kv: Inputs, scale: Tensor, row: int) -> Tensor:
    """The scales of a row's tokens, [length, num_kv_heads]."""
    return scale[kv.rows[row].long()].flatten(0, 1)[: kv.shape.lengths[row]]


def _packed_scale(kv: Inputs, scale: Tensor) -> Tensor:
    return scale if scale.dim() < 3 else torch.cat([_token_scale(kv, scale, row) for row in range(len(kv.rows))])


def _side_by_side(kv: Inputs, cache: Tensor, longest: int, dead: float) -> Tensor:
    size = (len(kv.rows), kv.shape.num_kv_heads, longest, kv.shape.head_dim)
    made = torch.empty(size, dtype=cache.dtype, device=cache.device)
    fill(made, torch.ones(1, dtype=torch.bool, device=cache.device), dead)
    for row, length in enumerate(kv.shape.lengths):
        made[row, :, :length] = kv.tokens(cache, row)
    return made


def _side_by_side_scale(kv: Inputs, scale: Tensor | None, longest: int, dead: float) -> Tensor | None:
    if scale is None or scale.dim() < 3:
        return scale
    made = scale.new_full((len(kv.rows), kv.shape.num_kv_heads, longest), dead)
    for row, length in enumerate(kv.shape.lengths):
        made[row, :, :length] = _token_scale(kv, scale, row).T
    return made
