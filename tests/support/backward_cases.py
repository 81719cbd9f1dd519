"""Problems of attention's backward: one table for every backend; tensors in hostile memory, with or without shared pages."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import cute_kernels as ck
from tests.support.attention_cases import CONTIGUOUS, EVERYTHING, LENGTHS, UNIFORM, AttentionInputs, case, make_attention, stored
from tests.support.attention_cases import Case as AttentionCase
from tests.support.inputs import NAN

PREFILL = {"lengths": (200, 130, 77)}
ROWS = {"q_lens": (200, 130, 77), "max_q_len": 200}


@dataclass(frozen=True)
class Case:
    """attention: the forward's case. shared: whether requests share pages, and a row repeats some. unread: the descriptor's.

    declared: the descriptor's shared_pages, if it differs from `shared`.
    """

    name: str
    attention: AttentionCase
    shared: bool = False
    unread: str = "zeros"
    declared: bool | None = None

    def __str__(self) -> str:
        return self.name

    def descriptor(self) -> ck.PagedAttentionBackwardDescriptor:
        d = self.attention.descriptor()
        shared = d.page_size is not None and (self.shared if self.declared is None else self.declared)
        if d.page_size is not None:
            pages = self.attention.cache.pages
            d = replace(d, num_pages=sum(pages) + 3, max_pages=max(pages, default=0) + 2)
        return ck.PagedAttentionBackwardDescriptor(d, shared_pages=shared, unread=self.unread, max_total_q=self.total_q)

    @property
    def total_q(self) -> int:
        return max(1, sum(self.attention.q_lens) + 3)


def backward_case(name: str, cache: dict[str, Any] | None = None, own: dict[str, Any] | None = None, **fields: Any) -> Case:
    """A case over an attention case that attention_cases.case makes. own: fields of the backward's case."""
    return Case(name, case(name, {"lengths": LENGTHS, **(cache or {})}, **fields), **(own or {}))


F16, F32 = torch.float16, torch.float32
SHARED = {"shared": True}
CASES = (
    backward_case("causal"),
    backward_case("top_left", causal="top_left"),
    backward_case("no_mask", causal=None),
    backward_case("windows", causal=None, window_left=7, window_right=3),
    backward_case("window_0", window_left=0),
    backward_case("window_largest", window_left=2**31 - 1),
    backward_case("window_right_largest", causal=None, window_right=2**31 - 1, window_left=17),
    backward_case("softcap", softcap=2.0),
    backward_case("alibi", alibi=True),
    backward_case("sinks", sinks=True),
    backward_case("everything", own=SHARED, **EVERYTHING),
    backward_case("everything_f16_base2", {"dtype": F16, "lse_base": "2", "softmax_scale": 0.3}, **EVERYTHING),
    backward_case("uniform", **UNIFORM),
    backward_case("uniform_strided_everything", strided=True, **UNIFORM, **EVERYTHING),
    backward_case("one_row", **{**UNIFORM, "q_lens": (1,) * len(LENGTHS), "max_q_len": 1}),
    backward_case("csr", {"page_size": 8}, own=SHARED, table="csr"),
    backward_case("nhd_p64", {"order": "NHD", "page_size": 64}, own={"unread": "untouched"}, window_left=64),
    backward_case("page_5_d40", {"page_size": 5, "head_dim": 40}, own=SHARED, window_left=9),
    backward_case("page_1", {"page_size": 1}, own=SHARED),
    backward_case("page_256", {"page_size": 256, "lengths": (700, 3, 257)}, own=SHARED, q_lens=(8, 3, 5)),
    backward_case("lengths", own={"unread": "untouched"}, table="lengths"),
    backward_case("lengths_nhd_everything", {"order": "NHD"}, table="lengths", **EVERYTHING),
    backward_case("packed", table="packed", window_left=5),
    backward_case("whole", {"lengths": (70,) * 4}, table="none", q_lens=(3, 0, 8, 70), max_q_len=70),
    backward_case("mha", {"num_heads": 4, "num_kv_heads": 4}, **EVERYTHING),
    backward_case("group_5_d96", {"num_heads": 10, "num_kv_heads": 2, "head_dim": 96}, own=SHARED, **EVERYTHING),
    backward_case("mqa_d128", {"num_heads": 8, "num_kv_heads": 1, "head_dim": 128}, own=SHARED),
    backward_case("d192", {"head_dim": 192}, window_left=50),
    backward_case("d256", {"head_dim": 256}, own=SHARED, sinks=True),
    backward_case("shared_untouched", own={"shared": True, "unread": "untouched"}, window_left=30),
    backward_case("unshared_by_chains", own={"declared": True}),
    backward_case("prefill", PREFILL, own=SHARED, **ROWS),
    backward_case("prefill_d128", {**PREFILL, "head_dim": 128}, table="packed", **ROWS, **EVERYTHING),
    backward_case("prefill_windows", PREFILL, **ROWS, causal=None, window_left=33, window_right=20),
    backward_case("no_rows", q_lens=(0,) * len(LENGTHS)),
    backward_case("no_keys", {"lengths": (0, 0)}, q_lens=(2, 3), sinks=True),
)  # fmt: skip


def in_f32(one: Case) -> Case:
    """The same case with f32 operands."""
    return replace(one, attention=replace(one.attention, cache=replace(one.attention.cache, dtype=F32)))


@dataclass
class BackwardInputs:
    """Tensors of a case: the forward's, its out in the operands' dtype, its lse in f32, and the gradient of out."""

    case: Case
    attention: AttentionInputs
    out: Tensor
    lse: Tensor
    dout: Tensor
    extras: dict[str, Tensor] = field(default_factory=dict)

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of a run, except its gradients."""
        own = self.attention
        tensors = {"dout": self.dout, "q": own.q, "k_cache": own.k, "v_cache": own.v, "out": self.out, "lse": self.lse}
        return {**tensors, "page_table": own.table, **self.extras}


def share_pages(inputs: AttentionInputs, dead: float) -> AttentionInputs:
    """Replaces every other page of a row by a full page of the longest row, shifted; some rows of three or more repeat a page."""
    kv, size = inputs.kv, inputs.case.cache.page_size
    source = max(range(len(kv.rows)), key=lambda row: inputs.case.cache.lengths[row])
    full = kv.rows[source][: inputs.case.cache.lengths[source] // size]
    rows = [row.clone() for row in kv.rows]
    for b, row in enumerate(rows):
        for j in range(len(row)):
            if b != source and len(full) and (b + j) % 2 == 0:
                row[j] = full[(b + j) % len(full)]
        if len(row) > 2 and (b != source or len(full) > 2):
            row[0] = full[1] if b == source else row[1] if len(row) > 2 and (b + 1) % 2 == 0 else row[0]
    kv = replace(kv, rows=rows)
    k, v, table, scales = stored(inputs.case, kv, dead)
    return replace(inputs, kv=kv, k=k, v=v, table=table, scales=scales)


def make_backward(one: Case, device: str = "cpu", seed: int = 0, dead: float = NAN) -> BackwardInputs:
    """Random inputs; slots of no key, padding rows and table entries past a row's end are poison or garbage.

    out and lse are computed in f64 and rounded.
    """
    from tests.support.attention_harness import attend

    attention = make_attention(one.attention, device, seed, dead)
    if one.shared and one.attention.table not in CONTIGUOUS:
        attention = share_pages(attention, dead)
    rows, begins = attention.rows, one.attention.begins
    out = torch.full_like(rows, dead)
    lse = torch.full(rows.shape[:2], dead, device=device)
    for b, n in enumerate(one.attention.q_lens):
        if n:
            exact, exact_lse, _ = attend(attention, b)
            out[begins[b] : begins[b] + n], lse[begins[b] : begins[b] + n] = exact.to(out.dtype), exact_lse.float()
    generator = torch.Generator(device).manual_seed(seed + 2000)
    dout = torch.randn(rows.shape, device=device, generator=generator).to(rows.dtype)
    dout[sum(one.attention.q_lens) :] = dead
    if one.attention.uniform:
        out, dout = (like(attention.q, t.unflatten(0, attention.q.shape[:2])) for t in (out, dout))
    extras = {name: t for name, t in attention.extras.items() if name != "tree_mask"}
    return BackwardInputs(one, attention, out, lse, dout, extras)


def like(q: Tensor, values: Tensor) -> Tensor:
    """`values` with q's layout in memory."""
    made = torch.empty_like(q)
    made.copy_(values)
    return made
