"""Adversarial cases 1 to 7, 9 and 10, of 16 and of 8 bits: each once bit a real system. Bitwise where the contract is bitwise."""

import dataclasses
import math

import pytest
import torch

from tests.support.harness import BACKENDS, assert_bitwise, assert_close, device_of, run, select
from tests.support.inputs import LENGTHS, Inputs, Shape, make_inputs, poison
from tests.support.storage import STORAGES

STORED = pytest.mark.parametrize("storage", STORAGES)
UNSCALED = pytest.mark.parametrize("storage", ["16 bits", "e4m3"])
SPLITS = pytest.mark.parametrize("max_seq_len", [64, 4096], ids=["whole", "split"])


@STORED
@pytest.mark.parametrize("backend", BACKENDS)
@SPLITS
@pytest.mark.parametrize("dead", [math.nan, math.inf, -math.inf, 6e4], ids=["nan", "inf", "-inf", "6e4"])
def test_dead_slots_and_pages_never_reach_a_result(dead: float, max_seq_len: int, storage: str, backend: str) -> None:
    shape = Shape(max_seq_len=max_seq_len, **STORAGES[storage])
    plan, inputs = select(shape, backend), make_inputs(shape, device_of(backend), dead=None)
    clean = run(plan, inputs)
    poison(inputs, dead)
    assert_bitwise(run(plan, inputs), clean)


@STORED
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("beyond", [-(2**31), 2**31 - 1, -1, 10_000])
def test_garbage_past_a_rows_pages(beyond: int, storage: str, backend: str) -> None:
    shape = Shape(**STORAGES[storage])
    plan, inputs = select(shape, backend), make_inputs(shape, device_of(backend))
    clean = run(plan, dataclasses.replace(inputs, beyond=0))
    assert_bitwise(run(plan, dataclasses.replace(inputs, beyond=beyond)), clean)


@STORED
@pytest.mark.parametrize("backend", BACKENDS)
@SPLITS
def test_prefilled_outputs_and_workspace(max_seq_len: int, storage: str, backend: str) -> None:
    shape = Shape(max_seq_len=max_seq_len, **STORAGES[storage])
    plan, inputs = select(shape, backend), make_inputs(shape, device_of(backend))
    assert_bitwise(run(plan, inputs, fill=math.nan), run(plan, inputs, fill=7.0))


@STORED
@pytest.mark.parametrize("backend", BACKENDS)
@SPLITS
@pytest.mark.parametrize("lengths", [(0, 5, 70), (5, 0, 70), (5, 70, 0), (0, 0, 0), (1,), ()], ids=str)
def test_empty_rows_and_batches(lengths: tuple[int, ...], max_seq_len: int, storage: str, backend: str) -> None:
    shape = Shape(lengths=lengths, max_seq_len=max_seq_len, **STORAGES[storage])
    inputs = make_inputs(shape, device_of(backend))
    out, lse = run(select(shape, backend), inputs)
    if lengths:
        assert_close(inputs, out, lse)
    else:
        assert out.shape == (0, 8, 128) and lse.shape == (0, 8)


@STORED
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("invariant", [False, True], ids=["default", "invariant"])
def test_empty_rows_leave_the_others_alone(invariant: bool, storage: str, backend: str) -> None:
    """A row stays right when its neighbour is emptied, and keeps every bit under a plan that promises so."""
    shape = Shape(lengths=(300, 200), **STORAGES[storage])
    inputs = make_inputs(shape, device_of(backend))
    plan, table = select(shape, backend, batch_invariant=invariant), inputs.table()
    both = run(plan, inputs, table=table)
    table.operands[1][0] = 0
    one = run(plan, inputs, table=table)
    assert_close(inputs, *one, rows=[1])
    if invariant:
        assert_bitwise((one[0][1], one[1][1]), (both[0][1], both[1][1]))
    assert not one[0][0].any() and torch.isneginf(one[1][0]).all()


def _with_logits(shape: Shape, device: str, logits: list[float]) -> Inputs:
    """Inputs whose only row has these logits, as near as the cache stores them: q picks the first column of K."""
    inputs, target = make_inputs(shape, device), torch.tensor(logits, device=device)
    pages = inputs.rows[0].long()
    whole = torch.zeros(len(pages) * shape.page_size, device=device)
    whole[: len(logits)] = target
    unit = 1.0  # the logit of an element of 1
    if shape.k_scale:
        inputs.k_scale[pages] = (whole.abs() / 127).view(len(pages), shape.page_size, 1).to(inputs.k_scale.dtype)
        whole = whole.sign() * 127
    elif shape.kv_dtype is not None:
        unit = target.abs().max().item() / 448  # the largest e4m3
        whole = whole / unit
    inputs.q.zero_()
    inputs.q[..., 0] = unit / shape.scale
    column = whole.to(inputs.k.dtype).view(len(pages), 1, shape.page_size)
    for page, values in zip(pages.tolist(), column, strict=True):
        inputs.k[page, :, :, 0] = values
    return inputs


@STORED
@pytest.mark.parametrize("backend", BACKENDS)
@SPLITS
@pytest.mark.parametrize(
    "logits",
    [
        [-6e4] * 100,
        [-5e5] * 100,
        [0.0] * 99 + [6e4],
        [6e4] + [0.0] * 99,
        [0.0] + [-7 * math.log(2)] * 1023,
        [-6e4] * 200 + [-5e4],
    ],
    ids=["all -6e4", "all -5e5", "huge last", "huge first", "tail mass", "late rise"],
)
def test_extreme_logits(logits: list[float], max_seq_len: int, storage: str, backend: str) -> None:
    shape = Shape(lengths=(len(logits),), max_seq_len=max_seq_len, softmax_scale=0.0625, **STORAGES[storage])
    inputs = _with_logits(shape, device_of(backend), logits)
    assert_close(inputs, *run(select(shape, backend), inputs))


@STORED
@pytest.mark.parametrize("backend", BACKENDS)
@SPLITS
def test_zero_query_averages(max_seq_len: int, storage: str, backend: str) -> None:
    shape = Shape(lengths=(1, 100, 777), max_seq_len=max_seq_len, **STORAGES[storage])
    inputs = make_inputs(shape, device_of(backend))
    inputs.q.zero_()
    out, lse = run(select(shape, backend), inputs)
    assert_close(inputs, out, lse)
    assert lse[2, 0].item() == pytest.approx(math.log(777), rel=1e-6)


@UNSCALED
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_token_returns_its_value(storage: str, backend: str) -> None:
    """With one KV token the output is V, exactly."""
    shape = Shape(lengths=(1, 1), **STORAGES[storage])
    inputs = make_inputs(shape, device_of(backend))
    out, _ = run(select(shape, backend), inputs)
    for row in range(2):
        assert torch.equal(out[row].view(2, 4, 128).double(), inputs.real("v", row).expand(2, 4, 128))


@STORED
@pytest.mark.parametrize("backend", BACKENDS)
@SPLITS
def test_a_permutation_of_the_pool_changes_no_bit(max_seq_len: int, storage: str, backend: str) -> None:
    shape = Shape(max_seq_len=max_seq_len, **STORAGES[storage])
    plan, inputs = select(shape, backend), make_inputs(shape, device_of(backend))
    expected = run(plan, inputs)
    order = torch.randperm(inputs.k.shape[0], device=inputs.k.device)
    inverse = torch.argsort(order)
    pools = {name: getattr(inputs, name) for name in ("k", "v", "k_scale", "v_scale")}
    moved = dataclasses.replace(
        inputs,
        rows=[inverse[p.long()].int() for p in inputs.rows],
        **{name: None if pool is None else pool[order] for name, pool in pools.items()},
    )
    assert_bitwise(run(plan, moved), expected)


@STORED
@pytest.mark.parametrize("backend", BACKENDS)
def test_shared_and_repeated_pages(storage: str, backend: str) -> None:
    shape = Shape(lengths=(160, 160, 150), **STORAGES[storage])
    inputs = make_inputs(shape, device_of(backend), dead=None)
    inputs.rows[1] = inputs.rows[0].flip(0)
    inputs.rows[2] = inputs.rows[0][:1].expand(10)
    assert_close(inputs, *run(select(shape, backend), inputs))


@UNSCALED
@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_live_slot_is_not_hidden(storage: str, backend: str) -> None:
    """The control of the poison tests: a NaN inside the row must show."""
    shape = Shape(lengths=LENGTHS, **STORAGES[storage])
    inputs = make_inputs(shape, device_of(backend))
    inputs.k[int(inputs.rows[-1][0])] = torch.tensor(math.nan).to(inputs.k.dtype)
    out, _ = run(select(shape, backend), inputs)
    assert torch.isnan(out[-1]).all() and not torch.isnan(out[:-1]).any()
