"""Problems of attention weights: a table for every backend, tensors in hostile memory, and an independent f64 reference."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import cute_kernels as ck
from tests.support.attention_cases import CONTIGUOUS, AttentionInputs, make_attention
from tests.support.attention_cases import Case as AttentionCase
from tests.support.attention_harness import visible
from tests.support.harness import device_of
from tests.support.inputs import NAN, Shape

RELATIVE = 1e-5  # relative to max(1, |lse|), or to the sizes of a score's terms
LENGTHS = (0, 1, 5, 16, 31, 32, 33, 127, 128, 129, 300, 1000)
SPARE_KEYS = 24  # keys past the longest row, whose weights are all 0
Result = ck.AttentionWeights


@dataclass(frozen=True)
class Case:
    """attention: the cache, table and modifiers, with one query row per request. weights_dtype: None for no weights.

    max_seq_len: SPARE_KEYS past the longest row by default. tma: whether the sm90 variant may serve the case.
    """

    name: str
    attention: AttentionCase
    weights_dtype: torch.dtype | None = torch.float32
    mean: bool = True
    page_mass: bool = True
    max_seq_len: int = 0
    tma: bool = True

    def __str__(self) -> str:
        return self.name

    @property
    def keys(self) -> int:
        return self.max_seq_len or max(self.attention.cache.lengths) + SPARE_KEYS

    def descriptor(self) -> ck.AttentionWeightsDescriptor:
        one, cache = self.attention, self.attention.cache
        return ck.AttentionWeightsDescriptor(
            batch_size=one.batch,
            num_heads=cache.num_heads,
            num_kv_heads=cache.num_kv_heads,
            head_dim=cache.head_dim,
            page_size=None if one.table in CONTIGUOUS else cache.page_size,
            q_dtype=cache.dtype,
            max_seq_len=self.keys,
            kv_dtype=cache.kv_dtype,
            layout=getattr(ck.KVLayout, cache.order),
            table_format=one.table,
            softmax_scale=cache.softmax_scale,
            lse_base=cache.lse_base,
            k_scale=cache.k_scale,
            window_left=one.window_left,
            softcap=one.softcap,
            alibi=one.alibi,
            weights_dtype=self.weights_dtype,
            mean=self.mean,
            page_mass=self.page_mass,
        )


def case(name: str, cache: dict[str, Any] | None = None, modifiers: dict[str, Any] | None = None, **fields: Any) -> Case:
    """A case whose cache and modifiers differ from the usual ones. A contiguous cache has no page masses."""
    table = fields.pop("table", "dense")
    paged = table if table not in CONTIGUOUS else "dense"
    shape = replace(Shape(lengths=LENGTHS, head_dim=64, table_format=paged), **(cache or {}))
    rows = {"q_lens": (1,) * len(shape.lengths), "max_q_len": 1, "uniform": True}
    one = AttentionCase(name, shape, table=table, **rows, **(modifiers or {}))
    return Case(name, one, **{"page_mass": table not in CONTIGUOUS, **fields})


BF16, F16 = torch.bfloat16, torch.float16
E4M3, E5M2, INT8 = ck.KVDtype.E4M3, ck.KVDtype.E5M2, ck.KVDtype.INT8
HEAD, TENSOR, TOKEN, TOKEN_F16 = ck.KVScale.HEAD, ck.KVScale.TENSOR, ck.KVScale.TOKEN, ck.KVScale.TOKEN_F16
EVERYTHING = {"window_left": 40, "softcap": 3.0, "alibi": True, "sinks": True}
CASES = (
    case("usual"),
    case("usual_bf16", weights_dtype=BF16),
    case("f16_base2", {"dtype": F16, "lse_base": "2", "softmax_scale": 0.3}, weights_dtype=F16),
    case("32_8_128", {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}),
    case("odd_keys", max_seq_len=1003),  # weights are written one by one
    case("two_keys", max_seq_len=1030, weights_dtype=BF16),  # in pairs
    case("nhd_p64", {"order": "NHD", "page_size": 64}),
    case("csr", table="csr"),
    case("csr_p128_bf16", {"page_size": 128}, table="csr", weights_dtype=BF16),
    case("page_8", {"page_size": 8}),
    case("page_24", {"page_size": 24}, max_seq_len=1032),
    case("page_256", {"page_size": 256}),
    case("page_1024", {"page_size": 1024, "lengths": (0, 5, 1023, 1025, 3000)}),
    case("lengths", table="lengths"),
    case("lengths_nhd", {"order": "NHD"}, {"window_left": 100}, table="lengths"),
    case("whole", {"lengths": (300,) * 3}, table="none"),
    case("e4m3", {"kv_dtype": E4M3, "head_dim": 128}),
    case("e5m2_f16_tensor", {"kv_dtype": E5M2, "k_scale": TENSOR, "dtype": F16}),
    case("e4m3_head", {"kv_dtype": E4M3, "k_scale": HEAD}, weights_dtype=BF16),
    case("int8_token_f16", {"kv_dtype": INT8, "k_scale": TOKEN_F16, "num_heads": 16, "num_kv_heads": 4, "head_dim": 128}),
    case("int8_token_csr", {"kv_dtype": INT8, "k_scale": TOKEN, "page_size": 64}, table="csr"),
    case("int8_token_lengths", {"kv_dtype": INT8, "k_scale": TOKEN_F16}, table="lengths"),
    case("bf16_head", {"k_scale": HEAD}),
    case("bf16_token", {"k_scale": TOKEN}),
    case("window", modifiers={"window_left": 40}),
    case("window_0", modifiers={"window_left": 0}),
    case("softcap", modifiers={"softcap": 2.0}),
    case("alibi", modifiers={"alibi": True}),
    case("sinks", modifiers={"sinks": True}),
    case("everything", modifiers=EVERYTHING),
    case("everything_int8", {"kv_dtype": INT8, "k_scale": TOKEN_F16}, EVERYTHING, table="csr", weights_dtype=BF16),
    case("everything_e4m3_lengths", {"kv_dtype": E4M3, "k_scale": HEAD}, EVERYTHING, table="lengths"),
    case("mha", {"num_heads": 4, "num_kv_heads": 4}),
    case("mqa_8", {"num_heads": 8, "num_kv_heads": 1, "head_dim": 128}),
    case("group_5_d96", {"num_heads": 10, "num_kv_heads": 2, "head_dim": 96}),
    case("group_16", {"num_heads": 32, "num_kv_heads": 2}, weights_dtype=BF16),
    case("group_71", {"num_heads": 71, "num_kv_heads": 1}, {"alibi": True}),  # several m-tiles, the last of them partly used
    case("d256", {"head_dim": 256}),
    case("d256_int8", {"head_dim": 256, "kv_dtype": INT8, "k_scale": HEAD}),
    case("long", {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "lengths": (5000, 64, 0, 2049)}, weights_dtype=BF16),
    case("weights_alone", mean=False, page_mass=False),
    case("mean_alone", weights_dtype=None, page_mass=False),
    case("page_mass_alone", weights_dtype=None, mean=False),
    case("page_1", {"page_size": 1}, tma=False),
    case("page_5", {"page_size": 5}, {"window_left": 90}, tma=False, max_seq_len=1025),
    case("page_17_d40_e4m3", {"page_size": 17, "head_dim": 40, "kv_dtype": E4M3, "k_scale": TOKEN}, tma=False),
    case("d33", {"head_dim": 33}, tma=False),
    case("no_keys", {"lengths": (0, 0)}),
)  # fmt: skip


@dataclass
class WeightsInputs:
    """Tensors of a case: attention's inputs, and an lse f32 [batch, num_heads]."""

    case: Case
    attention: AttentionInputs
    lse: Tensor

    @property
    def given(self) -> dict[str, Any]:
        """The arguments of a run, except its outputs."""
        inputs = self.attention
        slopes = {"alibi_slopes": inputs.extras["alibi_slopes"]} if inputs.case.alibi else {}
        scale = {"k_scale": inputs.scales["k_scale"]}
        return {"q": inputs.rows, "k_cache": inputs.k, "lse": self.lse, "page_table": inputs.table, **scale, **slopes}

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that a run reads."""
        tables = [t for t in self.attention.table.operands if t is not None]
        return [t for t in (*self.given.values(), *tables) if isinstance(t, Tensor)]


def make_weights(case: Case, device: str = "cpu", seed: int = 0, dead: float = NAN) -> WeightsInputs:
    """Random inputs; slots that no row owns hold `dead`. The lse is computed in f64 and rounded to f32."""
    attention = make_attention(case.attention, device, seed, dead)
    batch, heads = case.attention.batch, case.attention.cache.num_heads
    lse = torch.full((batch, heads), -math.inf, device=device)
    for row in range(batch):
        scores = exact_scores(attention, row)[0]
        if case.attention.sinks:
            scores = torch.cat([scores, attention.extras["sinks"].double()[:, None]], 1)
        if scores.shape[1]:
            lse[row] = torch.logsumexp(scores, -1) / base_of(case)
    return WeightsInputs(case, attention, lse)


def base_of(case: Case) -> float:
    """The factor that makes an lse of the case natural."""
    return math.log(2) if case.attention.cache.lse_base == "2" else 1.0


def exact_scores(inputs: AttentionInputs, row: int) -> tuple[Tensor, Tensor]:
    """(scores f64 [num_heads, length], -inf for a key that is not seen; the sizes of the terms that they are summed from)."""
    one, cache = inputs.case, inputs.case.cache
    q, k = inputs.rows[row].double(), inputs.kv.real("k", row).repeat_interleave(cache.num_heads // cache.num_kv_heads, 0)
    scores = torch.einsum("hd,htd->ht", q, k) * cache.scale
    sizes = torch.einsum("hd,htd->ht", q.abs(), k.abs()) * cache.scale
    if one.softcap is not None:
        scores = one.softcap * torch.tanh(scores / one.softcap)
    if one.alibi:
        length = cache.lengths[row]
        distance = (length - 1 - torch.arange(length, device=q.device)).abs()
        biases = inputs.extras["alibi_slopes"].double()[:, None] * distance
        scores, sizes = scores - biases, sizes + biases
    return scores.masked_fill(~visible(inputs, row), -math.inf), sizes


def exact_weights(inputs: WeightsInputs, row: int) -> tuple[Tensor, Tensor]:
    """(weights f64 [num_heads, max_seq_len] by the given lse; the error allowed to each before it is rounded)."""
    scores, sizes = exact_scores(inputs.attention, row)
    lse = inputs.lse[row].double()[:, None] * base_of(inputs.case)
    keys, length = inputs.case.keys, inputs.attention.case.cache.lengths[row]
    found = torch.zeros(2, len(lse), max(keys, length), dtype=torch.float64, device=scores.device)
    if length:
        found[0, :, :length] = torch.exp(scores - lse)
        found[1, :, :length] = found[0, :, :length] * RELATIVE * torch.maximum(sizes, lse.abs().clamp(min=1))
        found[1, :, :length] += torch.finfo(torch.float32).tiny  # below tiny, an exponential may be 0
    return found[0, :, :keys], found[1, :, :keys]


def page_sums(mean: Tensor, page_size: int) -> Tensor:
    """The sums of `mean` [keys] over each page."""
    pages = -(-len(mean) // page_size)
    padded = torch.zeros(pages * page_size, dtype=mean.dtype, device=mean.device)
    padded[: len(mean)] = mean
    return padded.view(pages, page_size).sum(-1)


def assert_close(inputs: WeightsInputs, result: Result, rows: list[int] | None = None) -> None:
    """Asserts that each weight, mean and page mass of these rows is near f64, and that keys that do not count have +0.0."""
    d = inputs.case.descriptor()
    assert [output is not None for output in result] == [name in d.shapes for name in result._fields]
    for row in range(d.batch_size) if rows is None else rows:
        exact, allowed = exact_weights(inputs, row)
        if result.weights is not None:
            _check(f"weights of row {row}", result.weights[row], exact, allowed)
        exact, allowed = exact.mean(0), allowed.mean(0)
        if result.mean is not None:
            _check(f"mean of row {row}", result.mean[row], exact, allowed)
        if result.page_mass is not None:
            _check(f"page mass of row {row}", result.page_mass[row], *(page_sums(t, d.page_size) for t in (exact, allowed)))


def _check(name: str, got: Tensor, exact: Tensor, allowed: Tensor) -> None:
    """Asserts |got - exact| <= allowed + eps |exact|, with the dtype's eps, element by element; NaN never passes."""
    assert got.shape == exact.shape, (name, got.shape, exact.shape)
    number = torch.finfo(got.dtype)
    step = number.eps * exact.abs().clamp(min=number.tiny)
    error = (got.double() - exact).abs()
    wrong = ~(error <= allowed + step) | ((exact == 0) & (bits(got) != 0))
    if wrong.any():
        place = tuple(wrong.nonzero()[0].tolist())
        found = f"{got[place].item()} is not {exact[place].item():.6g}"
        raise AssertionError(f"{name}: at {list(place)} {found}; wrong: {int(wrong.sum())} of {wrong.numel()}")


def bits(tensor: Tensor) -> Tensor:
    """The bits of 16 or 32-bit elements as integers."""
    return tensor.contiguous().view(torch.int16 if tensor.dtype.itemsize == 2 else torch.int32)


def assert_bitwise(got: Result, expected: Result) -> None:
    """Asserts that the outputs are equal bit for bit."""
    for name, ours, theirs in zip(got._fields, got, expected, strict=True):
        assert (ours is None) == (theirs is None), name
        assert ours is None or theirs is None or torch.equal(bits(ours), bits(theirs)), name


def select(case: Case, backend: str, **preference: Any) -> ck.AttentionWeightsPlan:
    """A plan forced onto `backend`."""
    return ck.AttentionWeightsPlan.select(case.descriptor(), device_of(backend), ck.PlanPreference(arch=backend, **preference))


def outputs(d: ck.AttentionWeightsDescriptor, device: torch.device | str, fill: float = NAN) -> dict[str, Tensor]:
    """Outputs of a run, filled with `fill`."""
    dtypes = {"weights": d.weights_dtype}
    return {
        name: torch.full(shape, fill, dtype=dtypes.get(name, torch.float32), device=device) for name, shape in d.shapes.items()
    }


def run(
    plan: ck.AttentionWeightsPlan, inputs: WeightsInputs, fill: float = NAN, device: str | None = None, **changes: Any
) -> Result:
    """Runs with every output prefilled, on the inputs' device or another. changes: arguments that replace the inputs'."""
    made = outputs(plan.descriptor, device or inputs.lse.device, fill)
    return plan.run(**{**inputs.given, **made, **changes})
