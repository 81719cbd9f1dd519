"""AttentionWeightsPlan on the host: descriptors, the choice and its reasons, typed errors before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy as np
import pytest
import torch

import cute_kernels as ck
from cute_kernels import InvalidArgument, InvalidProblem, MisalignedOperand, Unsupported
from cute_kernels.config.weights import weights_supports
from cute_kernels.planning.variants import PRETEND
from cute_kernels.weights import plan as weights
from cute_kernels.weights.variants import explain, kernel_spec
from tests.support.choices import assert_first_that_serves
from tests.support.launches import recorded

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
D = ck.AttentionWeightsDescriptor(3, 8, 2, 64, 16, BF16, 64, mean=True, page_mass=True)
CONTIGUOUS = replace(D, page_size=None, table_format="lengths", page_mass=False)
SERVED = ck.AttentionWeightsDescriptor(64, 32, 8, 128, 16, BF16, 8192, mean=True, page_mass=True)
Args = dict[str, Any]


def arguments(d: ck.AttentionWeightsDescriptor = D) -> Args:
    """Good arguments of `run`, the outputs prefilled with 7."""
    table = torch.arange(12, dtype=torch.int32).view(3, 4)
    lengths = torch.tensor([0, 33, 64], dtype=torch.int32)
    paged = d.page_size is not None
    return {
        "q": torch.randn(3, 8, 64).to(d.q_dtype),
        "k_cache": torch.randn(12 if paged else 3, 2, d.page_size or 64, 64).to(d.problem.kv_dtype.torch_dtype),
        "lse": torch.zeros(3, 8),
        "page_table": ck.PageTable.dense(table, lengths) if paged else ck.PageTable.lengths(lengths),
        **{name: torch.full(shape, 7.0, dtype=d.weights_dtype if name == "weights" else F32) for name, shape in d.shapes.items()},
    }


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        *[
            (name, value, InvalidProblem)
            for name in ("num_heads", "num_kv_heads", "head_dim", "page_size", "max_seq_len")
            for value in (0, -1, 2**31, 1.0, True)
        ],
        *[("batch_size", value, InvalidProblem) for value in (-1, 2**31, "4", None)],
        *[("num_kv_heads", 3, InvalidProblem), ("page_size", None, InvalidProblem), ("num_pages", 0, InvalidProblem)],
        *[("table_format", value, InvalidProblem) for value in ("packed", "csc", None)],
        *[("layout", value, InvalidProblem) for value in ("HND", None)],
        *[("kv_dtype", value, InvalidProblem) for value in ("e4m3", BF16)],
        *[("k_scale", value, InvalidProblem) for value in ("head", None)],
        *[("softmax_scale", value, InvalidProblem) for value in (0.0, -1.0, float("nan"), "1")],
        *[("lse_base", value, InvalidProblem) for value in ("10", 2, None)],
        *[("window_left", value, InvalidProblem) for value in (-1, 2**31, 1.0)],
        *[("softcap", value, InvalidProblem) for value in (0.0, -1.0, float("inf"))],
        *[(name, value, InvalidProblem) for name in ("alibi", "mean", "page_mass") for value in (1, None)],
        *[("weights_dtype", value, InvalidProblem) for value in (F16, torch.float64, torch.int8, "f32")],
        *[("q_dtype", value, InvalidProblem) for value in ("bf16", None)],
        *[("q_dtype", value, Unsupported) for value in (torch.float64, torch.int8)],
    ],
)
def test_a_bad_descriptor_names_the_parameter_and_its_value(name: str, value: object, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        replace(D, **{name: value})
    assert name.removeprefix("num_kv_") in str(caught.value)
    assert isinstance(caught.value, ck.CuteKernelsError)


def test_outputs_that_make_no_sense() -> None:
    with pytest.raises(InvalidProblem, match="weights_dtype = None: must be a dtype where neither"):
        replace(D, weights_dtype=None, mean=False, page_mass=False)
    with pytest.raises(InvalidProblem, match="page_mass = True: must be False beside table_format"):
        replace(CONTIGUOUS, page_mass=True)
    with pytest.raises(InvalidProblem, match="page_size = 16: must be None beside table_format"):
        replace(CONTIGUOUS, page_size=16)


def test_descriptors_are_frozen_keys() -> None:
    assert replace(D) == D and hash(replace(D)) == hash(D) != hash(replace(D, mean=False))
    assert replace(D, kv_dtype=ck.KVDtype.BF16) == D
    with pytest.raises(FrozenInstanceError):
        D.mean = False  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "nbytes"),
    [
        ({}, 16),
        ({"max_seq_len": 63}, 4),
        ({"max_seq_len": 62}, 8),
        ({"weights_dtype": BF16}, 16),
        ({"weights_dtype": BF16, "max_seq_len": 63}, 2),
        ({"page_size": 5}, 4),
        ({"page_size": 5, "page_mass": False}, 16),
        ({"weights_dtype": None}, 16),
    ],
)
def test_a_store_writes_what_rows_and_chunks_allow(changes: dict[str, Any], nbytes: int) -> None:
    d = replace(D, **changes)
    assert d.store_bytes == nbytes
    spec = kernel_spec(d, "sm80", "sm_90a", 132)
    assert weights_supports(spec) == [] and spec.chunk * (d.weights_dtype.itemsize if d.weights_dtype else 4) % nbytes == 0


@pytest.mark.parametrize(
    ("changes", "chunk", "warps", "depth"),
    [
        ({}, 128, 4, 2),
        ({"kv_dtype": ck.KVDtype.E4M3}, 128, 4, 4),
        ({"head_dim": 64}, 128, 4, 4),
        ({"head_dim": 256}, 64, 2, 2),
        ({"page_size": 256}, 256, 4, 2),
        ({"page_size": 256, "page_mass": False}, 128, 4, 2),
        ({"page_size": 48}, 144, 4, 2),
        ({"page_size": 1024}, 1024, 4, 2),
        ({"num_heads": 256, "num_kv_heads": 8}, 128, 4, 2),
        ({"batch_size": 1}, 32, 1, 8),  # 256 CTAs
        ({"batch_size": 1, "max_seq_len": 32_768}, 64, 2, 4),
        ({"batch_size": 1, "page_size": 64}, 64, 2, 4),  # a page is a chunk at least
        ({"batch_size": 1, "page_size": 512}, 512, 4, 2),
        ({"batch_size": 1, "head_dim": 256}, 32, 1, 3),
    ],
)
def test_a_chunk_is_whole_pages_and_a_ring_what_memory_holds(changes: dict[str, Any], chunk: int, warps: int, depth: int) -> None:
    spec = kernel_spec(replace(SERVED, **changes), "sm90", "sm_90a", 132)
    assert (spec.chunk, spec.num_warps, spec.depth) == (chunk, warps, depth)
    assert weights_supports(spec) == []


def test_three_ctas_share_an_sm() -> None:
    assert kernel_spec(SERVED, "sm90", "sm_90a", 132).min_ctas_per_sm == 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"head_dim": 0, "v_head_dim": 0}, "head_dim=0 is outside"),
        ({"tile_n": 16}, "tile_n=16"),
        ({"num_warps": 3}, "num_stages=8 is not a multiple"),
        ({"chunk": 120}, "chunk=120 is no multiple of page_size=16"),
        ({"store_bytes": 2}, "store_bytes=2"),
        ({"num_kv_heads": 800}, "3200 query heads of 128 columns and a chunk of 128 keys"),
        ({"page_size": 12, "chunk": 132}, "TMA needs page_size to be a multiple of 8"),
        ({"arch": "sm80", "vector_bytes": 3}, "vector_bytes=3"),
    ],
)
def test_supports_gives_its_reason(change: dict[str, Any], reason: str) -> None:
    reasons = weights_supports(replace(kernel_spec(SERVED, "sm90", "sm_90a", 132), **change))
    assert any(reason in one for one in reasons), reasons


@pytest.mark.parametrize(
    ("gpu", "chosen"), [("h200", "sm90_weights"), ("a100", "sm80_weights"), ("l40s", "sm80_weights"), ("cpu", "cpu_reference")]
)
def test_the_first_variant_that_serves_is_chosen(gpu: str, chosen: str) -> None:
    assert_first_that_serves(
        explain(SERVED, PRETEND[gpu]), "weights", chosen, "attention weights, batch 64, heads 32/8, head_dim 128, up to 8192 keys"
    )


@pytest.mark.parametrize(
    ("changes", "preference", "reason"),
    [
        ({"q_dtype": F32}, {}, "q_dtype = torch.float32"),
        ({"kv_dtype": ck.KVDtype.F16}, {}, "kv_dtype = f16: must be q's, bf16, or an 8-bit one"),
        ({"head_dim": 272}, {}, r"head_dim=272 is outside 1\.\.256"),
        ({"page_size": 5}, {"arch": "sm90"}, "TMA needs page_size"),
        ({"num_heads": 3200, "num_kv_heads": 800}, {}, "shared memory"),
        ({"batch_size": 1, "max_seq_len": 2**31 - 1}, {}, "max_seq_len = 2,147,483,647: must be at most 2,147,352,576"),
        ({"batch_size": 2**28, "max_seq_len": 2**20}, {}, "CTAs of 128 keys, must be at most 2,147,483,647"),
    ],
)
def test_what_no_variant_serves_says_why(changes: dict[str, Any], preference: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        _ = explain(replace(SERVED, **changes), PRETEND["h200"], ck.PlanPreference(**preference)).chosen


def test_pages_that_tma_cannot_bring_go_by_cp_async() -> None:
    assert explain(replace(SERVED, page_size=5), PRETEND["h200"]).chosen.variant == "sm80_weights"


def test_what_a_plan_says_of_itself() -> None:
    plan = ck.AttentionWeightsPlan.select(D, "cpu")
    assert plan is ck.AttentionWeightsPlan.select(replace(D), "cpu")
    sku, guarantee = plan.sku, plan.precision_guarantee
    assert (sku.operation, sku.q_dtype, sku.kv_dtype, sku.out_dtype) == ("attention_weights", "bf16", "bf16", "f32")
    assert (sku.arch, sku.variant, sku.config, plan.workspace_size()) == ("cpu", "cpu_reference", None, 0)
    assert (guarantee.batch_invariant, guarantee.deterministic, guarantee.norm_ulps) == (True, True, 128)
    assert D.shapes == {"weights": (3, 8, 64), "mean": (3, 64), "page_mass": (3, 4)}


@pytest.mark.parametrize("bad", [None, "D", 3])
def test_select_takes_its_own_descriptor(bad: Any) -> None:
    with pytest.raises(InvalidArgument, match="must be a AttentionWeightsDescriptor"):
        ck.AttentionWeightsPlan.select(bad, "cpu")


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_the_kernel_is_given_views_of_the_operands(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    """As on an H200: one launch a run, none for an empty batch; K as HND, fp8 as bytes."""
    specs, launches = recorded(monkeypatch, weights)
    d = replace(D, layout=getattr(ck.KVLayout, layout), kv_dtype=ck.KVDtype.E4M3, k_scale=ck.KVScale.TOKEN, softcap=2.0)
    plan, args = ck.AttentionWeightsPlan(d, torch.device("cpu"), ck.PlanPreference()), arguments(d)
    assert specs == [kernel_spec(d, "sm90", "sm_90a", 132)] == [plan.sku.config] and plan.sku.arch == "sm90a"
    if layout == "NHD":
        args["k_cache"] = args["k_cache"].transpose(1, 2).contiguous()
    scale = torch.ones(12 * 16 * 2)
    for _ in range(2):
        result = plan.run(**args, k_scale=scale)
        assert result == (args["weights"], args["mean"], args["page_mass"])
    q, k, table, lengths, none, k_scale, lse, slopes, *outputs = launches[1][:11]
    assert (k.shape, k.dtype, k.data_ptr()) == ((12, 2, 16, 64), torch.uint8, args["k_cache"].data_ptr())
    assert k.stride() == ((2048, 1024, 64, 1) if layout == "HND" else (2048, 64, 128, 1))
    assert k_scale.shape == (12, 16, 2) and none is None and slopes is None
    assert [t is args[name] for t, name in zip((q, lse, *outputs), ("q", "lse", "weights", "mean", "page_mass"), strict=True)]
    assert (table, lengths) == args["page_table"].operands[:2]
    assert launches[1][11:-1] == (0.125, 64, 0, 2.0)
    empty = replace(d, batch_size=0)
    table = ck.PageTable.dense(torch.zeros(0, 4, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
    plan = ck.AttentionWeightsPlan(empty, torch.device("cpu"), ck.PlanPreference())
    plan.run(args["q"][:0], args["k_cache"], args["lse"][:0], table, k_scale=scale)
    assert len(launches) == 2


def bad(name: str, change: Callable[[Args], Args], error: type[Exception], *fragments: str) -> Any:
    """One malformed run: what is changed of good arguments, the error, and what its message names."""
    return pytest.param(change, error, fragments, id=name)


TENSORS = ("q", "k_cache", "lse", "weights", "mean", "page_mass")


def with_table(a: Args, index: int, tensor: object) -> Args:
    operands = list(a["page_table"].operands)
    operands[index] = tensor
    return {"page_table": ck.PageTable("dense", tuple(operands))}


RUNS = [
    *[
        bad(f"{name} is {kind}", lambda a, n=name, v=value: {n: v}, InvalidArgument, name, kind, "tensor")
        for name in TENSORS
        for kind, value in (("list", [1.0]), ("ndarray", np.zeros(3)))
    ],
    *[bad(f"{name} is missing", lambda a, n=name: {n: None}, InvalidArgument, name, "NoneType") for name in TENSORS[:3]],
    *[
        bad(f"{name} is f64", lambda a, n=name: {n: a[n].double()}, InvalidArgument, name, "torch.float64", "must be")
        for name in TENSORS
    ],
    bad("lse is bf16", lambda a: {"lse": a["lse"].bfloat16()}, InvalidArgument, "lse", "torch.bfloat16", "torch.float32"),
    *[
        bad(f"{name} is elsewhere", lambda a, n=name: {n: a[n].to("meta")}, InvalidArgument, name, "meta", "cpu")
        for name in TENSORS
    ],
    *[
        bad(f"{name} lacks a row", lambda a, n=name: {n: a[n][:2]}, InvalidProblem, f"{name}.shape", "[")
        for name in TENSORS
        if name != "k_cache"
    ],
    *[bad(f"{name} has one axis more", lambda a, n=name: {n: a[n][None]}, InvalidProblem, f"{name}.shape") for name in TENSORS],
    bad("weights lack a key", lambda a: {"weights": a["weights"][..., :63]}, InvalidProblem, "weights.shape", "max_seq_len"),
    bad("mean has a key more", lambda a: {"mean": torch.zeros(3, 65)}, InvalidProblem, "mean.shape", "max_seq_len"),
    bad("a page too many", lambda a: {"page_mass": torch.zeros(3, 5)}, InvalidProblem, "page_mass.shape", "max_pages"),
    bad("lse lacks a head", lambda a: {"lse": a["lse"][:, :7]}, InvalidProblem, "lse.shape", "num_heads"),
    bad("another page size", lambda a: {"k_cache": a["k_cache"][:, :, :8]}, InvalidProblem, "k_cache.shape", "page_size"),
    bad("K is expanded", lambda a: {"k_cache": a["k_cache"][:1].expand(12, 2, 16, 64)}, Unsupported, "k_cache.stride"),
    bad("K is shifted", lambda a: {"k_cache": shifted(a["k_cache"])}, MisalignedOperand, "k_cache.data_ptr", "16"),
    bad("weights are shifted", lambda a: {"weights": shifted(a["weights"])}, MisalignedOperand, "weights.data_ptr", "16"),
    bad(
        "weights of odd rows",
        lambda a: {"weights": torch.zeros(3, 8, 65)[..., :64]},
        MisalignedOperand,
        "weights.stride(1)",
        "16",
    ),
    bad("weights' keys apart", lambda a: {"weights": torch.zeros(3, 8, 64, 2)[..., 0]}, Unsupported, "weights.stride", "last"),
    bad("weights are q's", lambda a: {"weights": overlapping(a)}, InvalidArgument, "weights", "overlap lse"),
    bad("mean within itself", lambda a: {"mean": torch.zeros(1, 64).expand(3, 64)}, InvalidArgument, "mean", "share memory"),
    bad("mean in weights", lambda a: {"mean": a["weights"][:, 0]}, InvalidArgument, "overlap"),
    bad("no table", lambda a: {"page_table": None}, InvalidArgument, "page_table", "PageTable"),
    bad("another format", lambda a: {"page_table": ck.PageTable.whole()}, InvalidArgument, "page_table", "must be dense"),
    bad("an i64 table", lambda a: with_table(a, 0, a["page_table"].operands[0].long()), InvalidArgument, "page_table.table"),
    bad("a length too few", lambda a: with_table(a, 1, a["page_table"].operands[1][:2]), InvalidProblem, "page_table.seq_lens"),
    bad("a scale", lambda a: {"k_scale": torch.ones(1)}, InvalidArgument, "k_scale", "must be None"),
    bad("slopes", lambda a: {"alibi_slopes": torch.ones(8)}, InvalidArgument, "alibi_slopes", "must be None"),
    bad("a stream on the cpu", lambda a: {"stream": "default"}, InvalidArgument, "stream", "default"),
]


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same shape and strides, an element behind an aligned address."""
    return torch.zeros(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)


def overlapping(a: Args) -> torch.Tensor:
    """Weights whose memory lse is a part of."""
    a["lse"] = torch.zeros(3 * 8 * 64)
    whole, a["lse"] = a["lse"].view(3, 8, 64), a["lse"][:24].view(3, 8)
    return whole


@pytest.mark.parametrize(("change", "error", "fragments"), RUNS)
def test_bad_operands_are_named_before_anything_is_written(
    change: Callable[[Args], Args], error: type[Exception], fragments: tuple[str, ...]
) -> None:
    plan, good = ck.AttentionWeightsPlan.select(D, "cpu"), arguments()
    changed = change(good)
    args = {**good, **changed}
    kept = {name: good[name] for name in D.shapes if isinstance(good[name], torch.Tensor)}
    for call in (plan.run, plan.can_implement):
        if call == plan.can_implement and args.pop("stream", None):
            continue
        with pytest.raises(error) as caught:
            call(**args)
        assert all(fragment in str(caught.value) for fragment in fragments), str(caught.value)
        assert isinstance(caught.value, ck.CuteKernelsError)
    assert all((tensor == 7).all() for tensor in kept.values())


def test_outputs_that_are_not_asked_for() -> None:
    d = replace(D, mean=False, page_mass=False)
    args = arguments(d)
    with pytest.raises(InvalidArgument, match="mean: got Tensor, must be None: the descriptor does not ask for it"):
        ck.AttentionWeightsPlan.select(d, "cpu").run(**args, mean=torch.zeros(3, 64))


@pytest.mark.parametrize(
    ("changes", "name", "tensor", "error"),
    [
        ({"alibi": True}, "alibi_slopes", None, InvalidArgument),
        ({"alibi": True}, "alibi_slopes", torch.zeros(7), InvalidProblem),
        ({"alibi": True}, "alibi_slopes", torch.zeros(8, dtype=F16), InvalidArgument),
        ({"k_scale": ck.KVScale.HEAD}, "k_scale", None, InvalidArgument),
        ({"k_scale": ck.KVScale.HEAD}, "k_scale", torch.ones(8), InvalidProblem),
        ({"k_scale": ck.KVScale.TOKEN}, "k_scale", torch.ones(12, 16, 2, dtype=F16), InvalidArgument),
        ({"k_scale": ck.KVScale.TOKEN}, "k_scale", torch.ones(12, 2, 16), InvalidProblem),
    ],
)
def test_what_the_descriptor_asks_for_is_given(changes: Args, name: str, tensor: Any, error: type[Exception]) -> None:
    d = replace(D, **changes)
    with pytest.raises(error, match=name):
        ck.AttentionWeightsPlan.select(d, "cpu").run(**arguments(d), **{name: tensor})


def test_a_whole_cache_has_at_most_max_seq_len_keys() -> None:
    d = replace(CONTIGUOUS, table_format="none", max_seq_len=63)
    args = {**arguments(replace(d, max_seq_len=64)), "page_table": ck.PageTable.whole(), "weights": None, "mean": None}
    with pytest.raises(InvalidProblem, match=r"k_cache.shape .* at most max_seq_len = 63"):
        ck.AttentionWeightsPlan.select(d, "cpu").run(**args)


def test_can_implement_takes_inputs_alone_and_outputs_are_allocated() -> None:
    plan, args = ck.AttentionWeightsPlan.select(D, "cpu"), arguments()
    inputs = {name: args[name] for name in ("q", "k_cache", "lse", "page_table")}
    plan.can_implement(**inputs)
    made, kept = plan.run(**inputs), plan.run(**args)
    assert all(torch.equal(a, b) for a, b in zip(made, kept, strict=True))
    with pytest.raises(TypeError, match="sinks"):
        plan.can_implement(**inputs, sinks=None)


def test_a_run_under_an_unknown_failure_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, args = ck.AttentionWeightsPlan.select(D, "cpu"), arguments()

    def refuse(*operands: object) -> None:
        raise RuntimeError("invalid configuration")

    monkeypatch.setattr(plan, "_launch", refuse)
    with pytest.raises(ck.LaunchFailed, match="cpu_reference on cpu: invalid configuration"):
        plan.run(**args)
