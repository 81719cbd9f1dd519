"""What only a GPU can show: graphs, determinism under repetition, 64-bit offsets, streams, and the plan's own device."""

import pytest
import torch

import cute_kernels as ck
from tests.support.harness import assert_bitwise, assert_close, run, select
from tests.support.inputs import NAN, Inputs, Shape, make_inputs
from tests.support.storage import STORAGES

pytestmark = pytest.mark.gpu
ARCHES = ("sm90", "sm80")


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("table_format", ["dense", "csr"])
@pytest.mark.parametrize("max_seq_len", [64, 4096], ids=["whole", "split"])
def test_a_graph_replays_with_changed_lengths_and_tables(max_seq_len: int, table_format: str, arch: str) -> None:
    """Captured short and replayed long, and the reverse: each replay equals the eager run bit for bit."""
    shape = Shape(lengths=(1, 2, 3, 4), max_seq_len=max_seq_len, table_format=table_format)
    plan = select(shape, arch)
    short = make_inputs(shape, "cuda", seed=1)
    lengths = ((900, 17, 0, 333), (0, 0, 0, 0), (5, 900, 64, 1), (1, 1, 1, 1))
    batches = [make_inputs(Shape(**{**shape.__dict__, "lengths": n}), "cuda", seed=i) for i, n in enumerate(lengths)]
    pages, entries = max(b.k.shape[0] for b in batches), max(sum(b.shape.pages) for b in batches)
    held = [torch.zeros(pages, *short.k.shape[1:], dtype=shape.dtype, device="cuda") for _ in range(2)]
    table = _table_buffers(table_format, len(shape.lengths), entries)
    q, out, lse = short.q.clone(), torch.empty_like(short.q), torch.empty(short.q.shape[:2], device="cuda")
    workspace = plan.new_workspace()
    _load(held, table, q, short)
    plan.run(q, *held, table, out=out, lse=lse, workspace=workspace)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan.run(q, *held, table, out=out, lse=lse, workspace=workspace)
    for inputs in (*batches, short, *reversed(batches)):
        _load(held, table, q, inputs)
        eager = plan.run(q, *held, table, workspace=workspace)
        out.fill_(NAN), lse.fill_(NAN)
        graph.replay()
        assert_bitwise((out, lse), eager)
        assert_close(inputs, out, lse)


def _table_buffers(table_format: str, batch: int, entries: int) -> ck.PageTable:
    vector = torch.zeros(batch, dtype=torch.int32, device="cuda")
    if table_format == "dense":
        return ck.PageTable.dense(torch.zeros(batch, entries + 2, dtype=torch.int32, device="cuda"), vector)
    indptr = torch.zeros(batch + 1, dtype=torch.int32, device="cuda")
    return ck.PageTable.csr(indptr, torch.zeros(entries, dtype=torch.int32, device="cuda"), vector)


def _load(held: list[torch.Tensor], table: ck.PageTable, q: torch.Tensor, inputs: Inputs) -> None:
    """Copies a batch into the buffers that the graph reads."""
    for target, source in zip(held, (inputs.k, inputs.v), strict=True):
        target[: source.shape[0]] = source
    for target, source in zip(table.operands, inputs.table().operands, strict=True):
        if target is not None:
            target[tuple(slice(n) for n in source.shape)] = source
    q.copy_(inputs.q)


@pytest.mark.parametrize("arch", ARCHES)
def test_a_thousand_repeats_are_bitwise_equal(arch: str) -> None:
    shape = Shape(num_heads=32, num_kv_heads=8, lengths=(3000, 1, 700, 4096), max_seq_len=4096)
    plan, inputs = select(shape, arch), make_inputs(shape, "cuda")
    assert plan.workspace_size() > 0
    table, first = inputs.table(), run(plan, inputs)
    for _ in range(1000):
        assert_bitwise(run(plan, inputs, table=table), first)


@pytest.mark.exclusive  # two pools of 4 GB each
@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize(
    ("order", "storage"),
    [("HND", "16 bits"), ("NHD", "16 bits"), ("NHD", "e4m3"), ("HND", "int8 token")],
    ids=["HND", "NHD", "NHD-e4m3", "HND-int8 token"],
)
def test_offsets_past_2_31_elements(order: str, storage: str, arch: str) -> None:
    """A pool of 2.2e9 elements a cache; the rows' pages lie at its very end."""
    heads = {"num_heads": 32, "num_kv_heads": 8, "page_size": 64}
    shape = Shape(**heads, lengths=(200, 1000), order=order, max_seq_len=1000, **STORAGES[storage])
    inputs = make_inputs(shape, "cuda")
    pages = -(-2_200_000_000 // inputs.k[0].numel())
    big, shift = [], pages - inputs.k.shape[0]
    for cache in (inputs.k, inputs.v):
        size = (pages, *cache.shape[1:]) if order == "HND" else (pages, 64, 8, 128)
        pool = torch.empty(size, dtype=cache.dtype, device="cuda").view(torch.uint8).fill_(0xFF).view(cache.dtype)  # NaN, or -1
        pool = pool.transpose(1, 2) if order == "NHD" else pool
        for page, values in enumerate(cache):
            pool[shift + page] = values
        big.append(pool)
    assert big[0].numel() > 2**31
    scales = {
        name: None if scale is None else torch.cat([scale[:1].expand(shift, -1, -1), scale])
        for name, scale in inputs.scales.items()
    }
    moved = Inputs(shape, inputs.q, *big, [row + shift for row in inputs.rows], **scales)
    plan = select(shape, arch)
    assert_bitwise(run(plan, moved), run(plan, inputs))
    assert_close(inputs, *run(plan, moved))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("storage", STORAGES)
def test_interleaved_k_and_v_views(storage: str, arch: str) -> None:
    """K and V as two views of one allocation, as vLLM keeps them."""
    shape = Shape(**STORAGES[storage])
    inputs = make_inputs(shape, "cuda")
    both = torch.stack([cache.view(torch.uint8) for cache in (inputs.k, inputs.v)], dim=1).view(inputs.k.dtype)
    views = Inputs(shape, inputs.q, both[:, 0], both[:, 1], inputs.rows, **inputs.scales)
    plan = select(shape, arch)
    assert_bitwise(run(plan, views), run(plan, inputs))


def test_a_side_stream_and_the_current_one_agree() -> None:
    shape = Shape()
    plan, inputs = select(shape, "sm90"), make_inputs(shape, "cuda")
    expected = run(plan, inputs)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    workspace = plan.new_workspace()
    got = plan.run(inputs.q, inputs.k, inputs.v, inputs.table(), workspace=workspace, stream=side)
    torch.cuda.current_stream().wait_stream(side)
    assert_bitwise(got, expected)


def test_what_a_plan_was_not_made_for_is_refused_before_any_launch() -> None:
    """Another batch, dtype, page size, device or strides, a short or misaligned workspace: typed, and nothing is written."""
    shape = Shape(max_seq_len=4096)
    plan, inputs = select(shape, "sm90"), make_inputs(shape, "cuda")
    table = inputs.table()
    out, lse = torch.full_like(inputs.q, 3.0), torch.full(inputs.q.shape[:2], 3.0, device="cuda")
    needed = plan.workspace_size()
    workspace = torch.full((needed + 16,), 0xCD, dtype=torch.uint8, device="cuda")
    good = {"q": inputs.q, "k_cache": inputs.k, "v_cache": inputs.v, "page_table": table, "workspace": workspace}
    flat = torch.empty(inputs.k.numel() + 8, dtype=shape.dtype, device="cuda")
    cases = [
        ({"q": inputs.q[:3]}, ck.InvalidProblem, "q"),
        ({"q": inputs.q.half()}, ck.InvalidArgument, "q"),
        ({"q": inputs.q.cpu()}, ck.InvalidArgument, "q"),
        ({"k_cache": inputs.k[:, :, :8]}, ck.InvalidProblem, "k_cache"),
        ({"v_cache": inputs.v.half()}, ck.InvalidArgument, "v_cache"),
        ({"k_cache": flat[1:-7].view_as(inputs.k)}, ck.MisalignedOperand, "k_cache"),
        ({"k_cache": inputs.k.transpose(2, 3).contiguous().transpose(2, 3)}, ck.Unsupported, "k_cache"),
        ({"workspace": workspace[: needed - 1]}, ck.WorkspaceTooSmall, str(needed)),
        ({"workspace": workspace[1:]}, ck.MisalignedOperand, "workspace"),
        ({"workspace": None}, ck.WorkspaceTooSmall, str(needed)),
    ]
    for change, error, named in cases:
        with pytest.raises(error, match=named):
            plan.run(**{**good, **change}, out=out, lse=lse)
    torch.cuda.synchronize()
    assert (out == 3.0).all() and (lse == 3.0).all() and (workspace == 0xCD).all()


def test_forced_sm80_says_so() -> None:
    plan = select(Shape(), "sm80")
    assert plan.sku.arch == "sm80" and plan.sku.variant == "sm80_cp_async"
    assert select(Shape(), "sm90").sku.arch == "sm90a"


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("length", [65_537, 131_072])
def test_long_rows(length: int, storage: str) -> None:
    shape = Shape(32, 8, page_size=64, lengths=(length, 3), max_seq_len=length, **STORAGES[storage])
    inputs = make_inputs(shape, "cuda")
    assert_close(inputs, *run(select(shape, "sm90"), inputs))
