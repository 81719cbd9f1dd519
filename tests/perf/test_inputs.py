"""perf.inputs: what the cases run on."""

import inspect
from dataclasses import replace

import pytest
import torch

from perf.append_inputs import make_append_inputs
from perf.case_sets import case_sets
from perf.cases import Case, Rows, fixed
from perf.inputs import make_inputs, num_sets
from perf.measure import Limits

L2_BYTES = 60 * 10**6  # of an H200, which NVIDIA's datasheet gives as 60 MB
CPU = torch.device("cpu")
RAGGED = Case(4, 2, 16, 4, Rows(((2, 9), (1, 4), (1, 1))))
CONTIGUOUS = Case(4, 2, 16, 0, fixed(3, 7), "f16", table_format="none")


def inputs_of(case):
    return make_inputs(case, CPU, memory_bytes=2**20, rotated_bytes=3 * case.kv_bytes)


@pytest.mark.parametrize(
    ("kv_bytes", "memory", "expected"), [(100, 10_000, 6), (400, 10_000, 2), (900, 10_000, 2), (900, 1_000, 1), (100, 600, 6)]
)
def test_num_sets_exceeds_what_is_asked_within_memory(kv_bytes, memory, expected):
    assert num_sets(kv_bytes, memory, rotated_bytes=600) == expected


@pytest.mark.parametrize(("kv_bytes", "memory"), [(100, 599), (900, 899)])
def test_num_sets_raises_where_memory_is_short(kv_bytes, memory):
    with pytest.raises(MemoryError, match=f"{memory} bytes allowed"):
        num_sets(kv_bytes, memory, rotated_bytes=600)


def test_what_is_rotated_over_exceeds_an_l2_many_times():
    """By the time a set is read again, at least eight times an L2 has passed: of the smallest cases too."""
    rotated = Limits(replays=21, trials=5, memory_bytes=2**36).rotated_bytes
    for make in (make_inputs, make_append_inputs):
        assert inspect.signature(make).parameters["rotated_bytes"].default == rotated
    cases = [
        case
        for name in ("throughput", "eight_bit", "append", "verify", "modifiers", "peers", "core")
        for case in case_sets()[name]
    ]
    sizes = {case.kv_bytes for case in cases if case.kv_bytes < 2**30}
    assert len(sizes) > 20 and min(sizes) < 2**20
    for kv_bytes in sizes:
        sets = num_sets(kv_bytes, 2**36, rotated)
        assert (sets - 1) * kv_bytes >= 8 * L2_BYTES or (sets == 2 and kv_bytes > 4 * L2_BYTES)


@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_unused_slots_are_nan_and_live_ones_are_not(layout):
    inputs = inputs_of(replace(RAGGED, layout=layout))
    pages = inputs.pages
    assert len(inputs.sets) == 3
    assert pages.unused.sum() == 4 * 9 - sum(RAGGED.tokens())  # 8 used pages and a spare one
    for s in inputs.sets:
        slots = s.k.transpose(1, 2) if layout == "HND" else s.k
        assert torch.equal(slots.isnan().all(dim=(2, 3)), pages.unused)
        assert torch.equal(slots.isnan().any(dim=(2, 3)), pages.unused)
    inputs.fill_unused(0.0)
    assert not any(cache.isnan().any() for s in inputs.sets for cache in (s.k, s.v))


def test_both_table_formats_name_the_same_pages():
    pages = inputs_of(RAGGED).pages
    counts = pages.indptr.diff()
    assert torch.equal(pages.table[pages.table >= 0], pages.indices)
    assert torch.equal((pages.table >= 0).sum(1), counts)
    assert torch.equal((counts - 1) * 4 + pages.last_page_len, pages.seq_lens)
    assert pages.seq_lens.tolist() == list(RAGGED.tokens())
    assert len(set(pages.indices.tolist())) == 8
    assert pages.indices.tolist() != sorted(pages.indices.tolist())


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("kv_dtype", ["e4m3", "e5m2", "int8"])
def test_unused_slots_of_8_bit_caches_and_their_scales_are_poisoned(kv_dtype, layout):
    inputs = inputs_of(replace(RAGGED, layout=layout, kv_dtype=kv_dtype, kv_scale="token-f16"))
    unused = inputs.pages.unused
    for s in inputs.sets:
        slots = s.v.transpose(1, 2) if layout == "HND" else s.v
        assert (slots.view(torch.uint8)[unused] == 0x7F).all()  # NaN of either fp8, 127 in int8
        assert slots[~unused].float().isfinite().all()
        assert torch.equal(s.v_scale.isnan().any(-1), unused)
        assert torch.equal(s.v_scale.isnan().all(-1), unused)
    inputs.fill_unused(0.0)
    assert not any(cache.view(torch.uint8)[inputs.pages.unused].any() for s in inputs.sets for cache in (s.k_scale, s.v_scale))
    assert all((s.k.transpose(1, 2) if layout == "HND" else s.k)[unused].float().eq(0).all() for s in inputs.sets)


@pytest.mark.parametrize(
    ("kv_dtype", "kv_scale", "largest"),
    [("e4m3", None, None), ("e5m2", "token", 57344), ("int8", "token-f16", 127), ("int8", "head", None)],
)
@pytest.mark.parametrize("source", ["HND", "NHD", "contiguous"])
def test_8_bit_rows_stand_for_normal_values(kv_dtype, kv_scale, largest, source):
    base = Case(4, 2, 64, 0, fixed(3, 70), table_format="none") if source == "contiguous" else replace(RAGGED, layout=source)
    inputs = inputs_of(replace(base, head_dim=64, kv_dtype=kv_dtype, kv_scale=kv_scale))
    s = inputs.sets[1]
    for name, index in (("k", 0), ("v", 1)):
        cache, scale = getattr(s, name), getattr(s, f"{name}_scale")
        assert cache.dtype == {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}[kv_dtype]
        for row, length in enumerate(inputs.case.tokens()):
            real = inputs.row(1, row)[index]
            assert real.shape == (2, length, 64)
            assert real.dtype == torch.float64
            for token in (0, length // 2, length - 1):
                for head in (0, 1):
                    assert torch.equal(real[head, token], one_token(inputs, cache, scale, row, token, head))
        everything = torch.cat([inputs.row(1, row)[index].flatten() for row in range(len(inputs.case.tokens()))])
        assert 0.8 < everything.std() < 1.8
        if scale is not None:
            assert len(scale[scale.isfinite()].unique()) > 1
        if largest is not None:  # a scale of its own brings every vector's largest element to the largest of the dtype
            tokens = cache.float().abs().amax(-1)
            live = (
                tokens if inputs.pages is None else (tokens.transpose(1, 2) if source == "HND" else tokens)[~inputs.pages.unused]
            )
            assert live.eq(largest).all()


def one_token(inputs, cache, scale, row, token, head):
    """What one stored vector stands for, looked up by itself: f64 [head_dim]."""
    if inputs.pages is None:
        stored, at = cache[row, head, token], (row, head, token)
    else:
        page, slot = inputs.pages.table[row, token // 4], token % 4
        stored = cache[page, head, slot] if inputs.case.layout == "HND" else cache[page, slot, head]
        at = (page, slot, head)
    if scale is None:
        return stored.double()
    return stored.double() * scale[at if scale.dim() == 3 else head % len(scale)].double()


def test_row_gathers_the_tokens_in_order():
    inputs = inputs_of(RAGGED)
    s, pages = inputs.sets[1], inputs.pages
    for row, length in enumerate(RAGGED.tokens()):
        k, v = inputs.row(1, row)
        assert k.shape == v.shape == (2, length, 16)
        for token in range(length):
            page = pages.table[row, token // 4]
            assert torch.equal(k[:, token], s.k[page, :, token % 4])
            assert torch.equal(v[:, token], s.v[page, :, token % 4])


@pytest.mark.parametrize(
    "case",
    [replace(RAGGED, kv_dtype="int8", kv_scale="token-f16"), replace(RAGGED, layout="NHD", kv_dtype="e4m3", kv_scale="head")],
)
def test_rows_of_one_length_are_what_row_gives_one_by_one(case):
    inputs = inputs_of(case)
    rows = [row for row, length in enumerate(case.tokens()) if length == 9]
    assert len(rows) == 2
    for found, name in zip(inputs.rows(1, rows, slice(1, 2)), (0, 1), strict=True):
        assert torch.equal(found, torch.stack([inputs.row(1, row)[name][1:2] for row in rows]))


def test_inputs_repeat_but_sets_differ():
    first, again = inputs_of(CONTIGUOUS), inputs_of(CONTIGUOUS)
    assert torch.equal(first.sets[0].k, again.sets[0].k)
    assert not torch.equal(first.sets[0].k, first.sets[1].k)
    assert first.sets[0].q.dtype == torch.float16
    assert first.sets[0].k.shape == (3, 2, 7, 16)
