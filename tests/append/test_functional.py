"""append_kv, merge_states and their torch ops: the bits of the plans, opcheck, torch.compile(fullgraph=True), fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import cute_kernels as ck
from cute_kernels.api import plan_cache, torch_ops
from tests.support.append_cases import Memory, cos_sin_of, fresh, given_scales, random_kv, random_slots

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
K, S, HND, NHD = ck.KVDtype, ck.KVScale, ck.KVLayout.HND, ck.KVLayout.NHD
PAGES, TOKENS, POSITIONS = 6, 24, 50
COPY = ck.KVAppendDescriptor(TOKENS, 3, 64, 8, BF16)
INT8 = replace(COPY, kv_dtype=K.INT8, layout=NHD, k_scale=S.TOKEN_F16, v_scale=S.TOKEN_F16)
E4M3 = replace(COPY, kv_dtype=K.E4M3, k_scale=S.HEAD, v_scale=S.TENSOR)
ROTARY = replace(INT8, rotary=ck.Rotary("interleaved", 32, num_heads=6, position_dtype=torch.int32))
CASES = [
    COPY,
    replace(COPY, dtype=F16, kv_dtype=None, slot_dtype=torch.int32),
    INT8,
    E4M3,
    replace(E4M3, v_dtype=K.E5M2, v_scale=S.TOKEN),
    replace(INT8, table_format="dense"),
    replace(INT8, table_format="csr"),
    ROTARY,
    replace(COPY, rotary=ck.Rotary()),
    replace(COPY, head_dim=5, kv_dtype=K.E5M2, num_kv_heads=1, layout=NHD),
]
BACKENDS = ["eager", "aot_eager"]
Args = dict[str, Any]


@pytest.fixture(autouse=True)
def _no_graphs() -> None:
    """Graphs of other tests count for the limit of recompilations."""
    torch._dynamo.reset()


def slots_of(d: ck.KVAppendDescriptor) -> torch.Tensor | ck.PageTable:
    if d.table_format == "none":
        return random_slots(d, TOKENS, PAGES)
    rows = torch.randperm(PAGES * d.page_size, generator=torch.Generator().manual_seed(1))[:TOKENS]
    pages, lengths = (rows // d.page_size).int(), (rows % d.page_size + 1).int()
    lengths[3] = 0
    if d.table_format == "dense":
        return ck.PageTable.dense(pages[:, None], lengths)
    return ck.PageTable.csr(torch.arange(TOKENS + 1).int(), pages, lengths)


def arguments(d: ck.KVAppendDescriptor) -> tuple[Args, Memory]:
    """Arguments that append_kv and a plan's run have in common, and what is written of them."""
    (k, v), memory = random_kv(d, TOKENS), fresh(d, PAGES)
    args: Args = {"k": k, "v": v, "k_cache": memory.k_cache, "v_cache": memory.v_cache, "slots": slots_of(d)}
    args |= {"k_scale": memory.k_scale, "v_scale": memory.v_scale} | given_scales(d, "cpu")
    if d.rotary is not None:
        args |= {"cos_sin_cache": cos_sin_of(POSITIONS, d.rotary.rotary_dim)}
        args["positions"] = (torch.arange(TOKENS) % POSITIONS).to(d.rotary.position_dtype)
        args["q"] = torch.randn(TOKENS, d.rotary.num_heads, d.head_dim).to(d.dtype) if d.rotary.num_heads else None
    return args, memory


def choices(d: ck.KVAppendDescriptor) -> Args:
    """What append_kv is told beside the tensors."""
    return {"layout": d.layout.order} | ({"pairing": d.rotary.pairing} if d.rotary else {})


def wanted(d: ck.KVAppendDescriptor, args: Args) -> tuple[Memory, torch.Tensor | None]:
    """What the plan leaves in memory of its own, and the q that it returns."""
    memory = fresh(d, PAGES)
    written = {"k_cache": memory.k_cache, "v_cache": memory.v_cache}
    written |= {name: x for name, x in (("k_scale", memory.k_scale), ("v_scale", memory.v_scale)) if x is not None}
    return memory, ck.KVAppendPlan.select(d, "cpu").run(**args | written)


def append_of(d: ck.KVAppendDescriptor) -> Callable[..., torch.Tensor | None]:
    """append_kv with the choices of `d`, as a function of tensors."""

    def append(args: Args) -> torch.Tensor | None:
        return ck.append_kv(**args, **choices(d))

    return append


def assert_same(got: torch.Tensor | None, want: torch.Tensor | None) -> None:
    assert (got is None) == (want is None) and (got is None or torch.equal(got, want))


@pytest.mark.parametrize("d", CASES, ids=str)
def test_appends_as_the_plan_does(d: ck.KVAppendDescriptor) -> None:
    args, memory = arguments(d)
    want, want_q = wanted(d, args)
    before = {name: args[name].clone() for name in ("k", "v", "q") if args.get(name) is not None}
    assert_same(append_of(d)(args), want_q)
    memory.assert_equals(want)
    assert all(torch.equal(args[name], x) for name, x in before.items()), "what is read stays"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("d", CASES, ids=str)
def test_an_append_compiles_as_one_graph(d: ck.KVAppendDescriptor, backend: str) -> None:
    """With what is computed before and behind it; twice, with other values; the caches themselves are written."""
    args, memory = arguments(d)
    tensors = {name: x for name, x in args.items() if name != "slots"}

    def layer(slots: Any, tensors: Args) -> tuple[torch.Tensor | None, torch.Tensor]:
        tensors = {**tensors, "k": tensors["k"] * 2}
        table = ck.PageTable(d.table_format, slots) if d.table_format != "none" else slots
        q = ck.append_kv(**tensors, slots=table, **choices(d))
        return None if q is None else q + 1, tensors["k_cache"].view(torch.uint8).sum()

    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    slots = args["slots"].operands if d.table_format != "none" else args["slots"]
    for _ in range(2):
        want, want_q = wanted(d, args | {"k": args["k"] * 2})
        got_q, total = compiled(slots, tensors)
        memory.assert_equals(want)
        assert_same(got_q, None if want_q is None else want_q + 1)
        assert total == want.k_cache.view(torch.uint8).sum(), "what follows sees what was written"
        args["k"].neg_()
        for written in (memory.k_cache, memory.v_cache, memory.k_scale, memory.v_scale):
            if written is not None:
                written.view(torch.uint8).fill_(0x55)


def test_one_graph_serves_any_number_of_tokens() -> None:
    """dynamic=True: the extents are symbols in the trace, and one trace serves them all."""
    args, memory = arguments(INT8)
    counter = CompileCounterWithBackend("aot_eager")

    def layer(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor, k_scale: torch.Tensor, v_scale: torch.Tensor) -> None:
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        ck.append_kv(k, v, args["k_cache"], args["v_cache"], slots, **scales, layout="NHD")

    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for tokens in (24, 7, 13):
        part = args | {name: args[name][:tokens].clone() for name in ("k", "v", "slots")}
        want, _ = wanted(INT8, part)
        for written in (memory.k_cache, memory.v_cache, memory.k_scale, memory.v_scale):
            written.view(torch.uint8).fill_(0x55)
        compiled(*(part[name] for name in ("k", "v", "slots", "k_scale", "v_scale")))
        memory.assert_equals(want)
    assert counter.frame_count == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_caches_of_one_allocation_compile_too(backend: str) -> None:
    """K and V of each page side by side, as engines keep them, and one scale for both."""
    d = replace(COPY, kv_dtype=K.E4M3, k_scale=S.TENSOR, v_scale=S.TENSOR)
    (k, v), slots, scale = random_kv(d, TOKENS), random_slots(d, TOKENS, PAGES), torch.tensor([0.3])
    pool = torch.zeros(PAGES, 2, 3, 8, 64, dtype=torch.uint8)

    def layer(k: torch.Tensor, v: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
        k_cache, v_cache = pool.view(torch.float8_e4m3fn).unbind(1)
        ck.append_kv(k, v, k_cache, v_cache, slots, k_scale=scale, v_scale=scale)
        return pool.clone()

    want = layer(k, v, pool)
    pool.zero_()
    assert torch.equal(torch.compile(layer, fullgraph=True, backend=backend)(k, v, pool), want) and torch.equal(pool, want)
    assert want.any()


@pytest.mark.parametrize("d", [COPY, INT8, replace(INT8, table_format="csr"), replace(INT8, k_scale=S.HEAD), ROTARY], ids=str)
def test_opcheck_append(d: ck.KVAppendDescriptor) -> None:
    args, _ = arguments(d)
    slots = args["slots"].operands if d.table_format != "none" else (args["slots"], None, None)
    kinds = dict(zip(("k_scale", "v_scale"), d.scales, strict=True))
    given = [args.get(name) if kind.granularity != "token" else None for name, kind in kinds.items()]
    made = [args.get(name) if kind.granularity == "token" else None for name, kind in kinds.items()]
    q, angles = args.get("q"), (args.get("cos_sin_cache"), args.get("positions"))
    rotated = (q, None if q is None else torch.empty_like(q), *angles)
    operands = (args["k"], args["v"], args["k_cache"], args["v_cache"], *slots, *given, *made, *rotated)
    torch.library.opcheck(torch_ops.append_kv, (*operands, d.layout.order, d.rotary.pairing if d.rotary else "half"))


@pytest.mark.parametrize("d", [COPY, ROTARY], ids=str)
def test_an_append_of_fake_tensors_writes_nothing(d: ck.KVAppendDescriptor) -> None:
    args, memory = arguments(d)
    before = fresh(d, PAGES)
    with FakeTensorMode() as mode:
        fakes = {name: mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for name, x in args.items()}
        q = append_of(d)(fakes)
    assert (q is None) == (d.rotary is None)
    assert q is None or (q.shape, q.dtype, type(q)) == (args["q"].shape, args["q"].dtype, FakeTensor)
    assert_same(None, append_of(d)({**fakes, "q": None}))  # outside the mode, fake tensors still have no memory
    memory.assert_equals(before)


def test_another_number_of_tokens_seldom_asks_for_aplan_of() -> None:
    args, _ = arguments(COPY)
    ck.append_kv(**args)
    before = plan_cache.plan_of.cache_info()
    for tokens in (17, 18, 23):
        ck.append_kv(**args | {name: args[name][:tokens] for name in ("k", "v", "slots")})
    after = plan_cache.plan_of.cache_info()
    assert (after.misses, after.hits) == (before.misses, before.hits + 3)
    ck.append_kv(**args | {name: args[name][:0] for name in ("k", "v", "slots")})


@pytest.mark.parametrize("offset", [1, 2, 4], ids=str)
def test_misaligned_tensors_are_served(offset: int) -> None:
    """Each with a plan of its own alignment: K, V, the caches, q and the angles."""
    args, memory = arguments(ROTARY)
    want, want_q = wanted(ROTARY, args)

    def shifted(x: torch.Tensor) -> torch.Tensor:
        moved = torch.zeros(x.numel() + offset, dtype=x.dtype)[offset:].view(x.shape)
        return moved.copy_(x)

    for name in ("k", "v", "k_cache", "v_cache", "q", "cos_sin_cache"):
        moved = shifted(args[name])
        got_q = append_of(ROTARY)(args | {name: moved})
        assert_same(got_q, want_q)
        found = replace_memory(memory, name, moved)
        found.assert_equals(want)


def replace_memory(memory: Memory, name: str, tensor: torch.Tensor) -> Memory:
    return replace(memory, **{name: tensor}) if name in ("k_cache", "v_cache") else memory


BAD = [
    *[({name: None}, ck.InvalidArgument, f"{name}: got NoneType, must be a tensor") for name in ("k", "v", "k_cache", "v_cache")],
    *[({name: 3}, ck.InvalidArgument, f"{name}: got int, must be a tensor or None") for name in ("q", "positions")],
    *[({name: 0.5}, ck.InvalidArgument, f"{name}: got float, must be a tensor or None") for name in ("k_scale", "v_scale")],
    ({"slots": [0]}, ck.InvalidArgument, "slots: got list, must be a tensor or a PageTable"),
    ({"slots": torch.zeros(TOKENS)}, ck.Unsupported, "slot_dtype = torch.float32"),
    ({"slots": torch.arange(3)}, ck.InvalidProblem, "slots.shape = (3,)"),
    ({"k": torch.zeros(3, 64).bfloat16()}, ck.InvalidProblem, "k.shape = (3, 64): must have the axes of [tokens, num_kv_heads"),
    ({"k": torch.zeros(24, 3, 64)}, ck.Unsupported, "dtype = torch.float32"),
    ({"v": torch.zeros(24, 3, 32).bfloat16()}, ck.InvalidProblem, "v.shape = (24, 3, 32)"),
    ({"k_cache": torch.zeros(6, 8, 192)}, ck.InvalidProblem, "k_cache.shape = (6, 8, 192): must have the axes of [num_pages"),
    (
        {"v_cache": torch.zeros(6, 8, 3, 64, dtype=torch.uint8)},
        ck.InvalidArgument,
        "v_cache: has dtype torch.uint8, must be",
    ),
    ({"layout": "XYZ"}, ck.InvalidProblem, 'layout = \'XYZ\': must be "HND" or "NHD"'),
    ({"pairing": "neox"}, ck.InvalidProblem, 'pairing = \'neox\': must be "half" or "interleaved"'),
    ({"k_scale": torch.ones(2)}, ck.InvalidProblem, "k_scale.shape = (2,)"),
    ({"k_scale": None}, ck.Unsupported, "k_scale = none: must be per tensor, head or token where kv_dtype = int8"),
    ({"q": torch.zeros(24, 6, 64).bfloat16()}, ck.InvalidArgument, "q: got Tensor, must be None"),
    ({"cos_sin_cache": torch.zeros(9, 64)}, ck.InvalidArgument, "positions: is None"),
    ({"cos_sin_cache": torch.zeros(9), "positions": torch.arange(24)}, ck.InvalidProblem, "cos_sin_cache.shape = (9,)"),
    ({"cos_sin_cache": torch.zeros(9, 66), "positions": torch.arange(24)}, ck.InvalidProblem, "rotary.rotary_dim = 66"),
]


@pytest.mark.parametrize(("changes", "error", "fragment"), BAD, ids=str)
def test_bad_arguments_of_append_kv(changes: Args, error: type[Exception], fragment: str) -> None:
    args, memory = arguments(INT8)
    with pytest.raises(error) as caught:
        ck.append_kv(**{**args, "layout": "NHD", **changes})
    assert fragment in str(caught.value) and isinstance(caught.value, ck.CuteKernelsError)
    memory.assert_equals(fresh(INT8, PAGES))


def states(dtype: torch.dtype, count: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    outs, lses = torch.randn(count, 4, 5, 64, generator=generator).to(dtype), torch.randn(count, 4, 5, generator=generator)
    lses[1, 2] = -torch.inf
    lses[:, 3, 1] = -torch.inf
    return outs, lses


@pytest.mark.parametrize("lse_base", ["e", "2"])
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_merges_as_the_plan_does(dtype: torch.dtype, lse_base: Any) -> None:
    outs, lses = states(dtype)
    plan = ck.MergeStatesPlan.select(ck.MergeStatesDescriptor(3, 4, 5, 64, dtype, lse_base), "cpu")
    want = plan.run(outs, lses)
    place = torch.full((4, 5, 64), 7.0, dtype=dtype), torch.full((4, 5), 7.0)
    for given in ({}, {"out": place[0], "lse": place[1]}, {"out": place[0]}):
        got = ck.merge_states(outs, lses, lse_base=lse_base, **given)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert all(got[i] is given[name] for i, name in enumerate(("out", "lse")) if name in given)
    sinks = torch.linspace(-1, 1, 5)
    with_sinks = ck.MergeStatesPlan.select(ck.MergeStatesDescriptor(3, 4, 5, 64, dtype, lse_base, sinks=True), "cpu")
    both = zip(ck.merge_states(outs, lses, sinks=sinks, lse_base=lse_base), with_sinks.run(outs, lses, sinks=sinks), strict=True)
    assert all(torch.equal(a, b) for a, b in both)
    moved = torch.zeros(outs.numel() + 1, dtype=dtype)[1:].view(outs.shape).copy_(outs)
    assert torch.equal(ck.merge_states(moved, lses, lse_base=lse_base)[0], want[0]), "another alignment"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_merge_compiles_as_one_graph(backend: str) -> None:
    outs, lses = states(BF16)
    out, lse = torch.empty(4, 5, 64, dtype=BF16), torch.empty(4, 5)

    def layer(outs: torch.Tensor, lses: torch.Tensor) -> tuple[torch.Tensor, ...]:
        merged = ck.merge_states(torch.cat([outs, outs[:1] + 1]), torch.cat([lses, lses[:1] * 2]), lse_base="2")
        ck.merge_states(outs, lses, out=out, lse=lse)
        return *merged, out + 1, lse + 1

    want = layer(outs, lses)
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    assert all(torch.equal(a, b) for a, b in zip(compiled(outs, lses), want, strict=True))


def test_opcheck_merge() -> None:
    outs, lses = states(F16)
    for sinks in (None, torch.zeros(5)):
        operands = (outs, lses, sinks, torch.empty(4, 5, 64, dtype=F16), torch.empty(4, 5), "e")
        torch.library.opcheck(torch_ops.merge_states, operands)


def test_a_merge_of_fake_tensors_has_the_shapes() -> None:
    with FakeTensorMode():
        out, lse = ck.merge_states(torch.empty(3, 4, 5, 64, dtype=F16), torch.empty(3, 4, 5))
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((4, 5, 64), F16, (4, 5), F32)


def test_traces_hold_the_ops() -> None:
    """A graph made by tracing calls them; a bypass would have left nothing of them in it."""
    outs, lses = states(F32)
    graph = make_fx(lambda outs, lses: ck.merge_states(outs, lses))(outs, lses)
    assert "cute_kernels.merge_states" in graph.code
    args, _ = arguments(COPY)
    graph = make_fx(lambda k, v: ck.append_kv(**args | {"k": k, "v": v}))(args["k"], args["v"])
    assert "cute_kernels.append_kv" in graph.code


@pytest.mark.parametrize(
    ("changes", "error", "fragment"),
    [
        ({"outs": None}, ck.InvalidArgument, "outs: got NoneType"),
        ({"lses": [1.0]}, ck.InvalidArgument, "lses: got list"),
        ({"out": 3}, ck.InvalidArgument, "out: got int, must be a tensor or None"),
        (
            {"outs": torch.zeros(3, 4, 5)},
            ck.InvalidProblem,
            "outs.shape = (3, 4, 5): must have the axes of [num_states",
        ),
        ({"out": torch.zeros(4, 5)}, ck.InvalidProblem, "out.shape = (4, 5): must have the axes of [batch_size"),
        ({"lses": torch.zeros(3, 4)}, ck.InvalidProblem, "lses.shape = (3, 4)"),
        ({"outs": torch.zeros(3, 4, 5, 64, dtype=torch.float64)}, ck.Unsupported, "dtype = torch.float64"),
        ({"outs": torch.zeros(0, 4, 5, 64)}, ck.InvalidProblem, "num_states = 0"),
        ({"lse_base": "10"}, ck.InvalidProblem, 'lse_base = \'10\': must be "e" or "2"'),
    ],
    ids=str,
)
def test_bad_arguments_of_merge_states(changes: Args, error: type[Exception], fragment: str) -> None:
    outs, lses = states(F32)
    with pytest.raises(error) as caught:
        ck.merge_states(**{"outs": outs, "lses": lses, **changes})
    assert fragment in str(caught.value) and isinstance(caught.value, ck.CuteKernelsError)


def test_the_names_are_those_of_the_package() -> None:
    """Also after modules of similar names were imported."""
    import cute_kernels.merge.plan

    assert callable(ck.merge_states) and callable(ck.append_kv) and cute_kernels.merge.plan.MergeStatesPlan is ck.MergeStatesPlan
    assert {"append_kv", "merge_states"} <= set(ck.__all__)
