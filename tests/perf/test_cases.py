"""perf.cases: the lengths, the bytes, the names, the sets and the bars."""

from dataclasses import replace

import pytest

from perf.case_sets import append_cases, bar_of, case_sets, eight_bit_cases, peers_cases, select_cases, throughput_cases
from perf.cases import Bar, Case, Rows, Spread, append_case, fixed, weights_case


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (Case(32, 8, 128, 16, fixed(64, 8192)), 2_147_483_648),  # 524,288 tokens of 8 x 128 x 2 bytes, K and V
        (Case(8, 1, 128, 16, fixed(64, 8192)), 268_435_456),
        (Case(16, 8, 256, 64, fixed(32, 4096), "f16"), 1_073_741_824),
        (Case(32, 8, 64, 16, Rows(((1, 131072), (31, 4096)))), 528_482_304),
        (Case(4, 2, 16, 0, fixed(3, 5), table_format="none"), 1_920),
        (Case(32, 8, 128, 16, fixed(64, 8192), kv_dtype="e4m3"), 1_073_741_824),
        (Case(32, 8, 128, 16, fixed(64, 8192), kv_dtype="int8", kv_scale="token-f16"), 1_090_519_040),  # 130 for 128 bytes
        (Case(32, 8, 128, 16, fixed(2, 3), kv_dtype="e5m2", kv_scale="token"), 12_672),  # 6 x 8 x 132, K and V
        (Case(32, 8, 128, 16, fixed(2, 3), kv_dtype="int8", kv_scale="head"), 12_352),
        (Case(32, 8, 128, 16, fixed(2, 3), kv_dtype="e4m3", kv_scale="tensor"), 12_296),
        (append_case(8192), 67_174_400),  # 8,192 tokens x 8 x 128 x 2 bytes, K and V, read and written, and their slots
        (append_case(64, kv_dtype="e4m3"), 393_728),
        (append_case(64, kv_dtype="int8", kv_scale="token-f16"), 395_776),  # 130 for 128 bytes written
        (weights_case(fixed(64, 8192)), 1_073_741_824 + 524_288 * 33 * 4 + 64 * 512 * 4),  # K, weights and mean, pages
    ],
)
def test_kv_bytes_counts_live_tokens_only(case, expected):
    assert case.kv_bytes == expected


def test_groups_keep_their_lengths_in_a_shuffled_order():
    rows = Rows(((1, 65536), (31, 4096)))
    tokens = rows.tokens()
    assert sorted(tokens) == [4096] * 31 + [65536]
    assert tokens == rows.tokens()
    assert {Rows(rows.groups, seed).tokens().index(65536) for seed in range(20)} != {0}


@pytest.mark.parametrize("kind", ["uniform", "loguniform"])
def test_spreads_stay_in_bounds_and_repeat(kind):
    spread = Spread(kind, 2000, 128, 32768, seed=3)
    tokens = spread.tokens()
    assert len(tokens) == 2000
    assert 128 <= min(tokens) < max(tokens) <= 32768
    assert tokens == Spread(kind, 2000, 128, 32768, seed=3).tokens()
    assert tokens != Spread(kind, 2000, 128, 32768, seed=4).tokens()
    middle = sorted(tokens)[1000]
    assert abs(middle - 2048) < 400 if kind == "loguniform" else abs(middle - 16448) < 1500


def test_names_say_everything_and_are_unique():
    assert Case(32, 8, 128, 16, fixed(64, 8192)).name == "gqa_paged_decode_h32_kv8_d128_ps16_bf16_b64_l8k"
    ragged = Case(8, 1, 128, 64, Rows(((1, 131072), (31, 4096))), "f16", "csr", "NHD")
    assert ragged.name == "gqa_paged_decode_h8_kv1_d128_ps64_f16_nhd_csr_b32_1x128k+31x4k"
    int8 = Case(32, 8, 128, 16, fixed(64, 8192), kv_dtype="int8", kv_scale="token-f16")
    assert int8.name == "gqa_paged_decode_h32_kv8_d128_ps16_bf16_kvint8_token-f16_b64_l8k"
    assert replace(int8, layout="NHD", kv_scale=None).name == "gqa_paged_decode_h32_kv8_d128_ps16_bf16_kvint8_nhd_b64_l8k"
    cases = {case for cases in case_sets().values() for case in cases}
    assert len({case.name for case in cases}) == len(cases)


def test_throughput_has_each_shape_in_both_dtypes_and_page_sizes():
    cases = throughput_cases()
    assert len(cases) == 9 * 2 * 2 + 2 * 2
    assert cases[Case(32, 8, 128, 64, fixed(128, 4096), "f16")] == Bar("ratio", 1.06)
    assert cases[Case(32, 8, 128, 16, fixed(1, 8192))] == Bar("us", 16.0)
    assert cases[Case(32, 8, 128, 1, fixed(32, 4096))] == Bar("ratio", 1.5)
    assert cases[Case(32, 8, 128, 8, fixed(32, 4096))] == Bar("ratio", 1.15)


def test_eight_bit_has_each_shape_in_every_storage_and_page_size():
    cases = eight_bit_cases()
    assert len(cases) == 11 * 3 * 2
    assert {(case.kv_dtype, case.kv_scale) for case in cases} == {("e4m3", None), ("e5m2", None), ("int8", "token-f16")}
    int8 = Case(32, 8, 128, 64, fixed(1, 8192), kv_dtype="int8", kv_scale="token-f16")
    assert bar_of(int8) == Bar("us", 9.5)
    assert bar_of(replace(int8, num_kv_heads=32, lengths=fixed(32, 2048))) == Bar("ratio", 1.08)
    assert bar_of(Case(16, 8, 256, 16, fixed(32, 4096), kv_dtype="e5m2")) == Bar("ratio", 1.06)
    assert bar_of(Case(32, 8, 128, 16, Spread("loguniform", 64, 128, 32768), kv_dtype="e4m3")) == Bar("ratio", 166 / 154)
    assert bar_of(replace(int8, kv_dtype=None, kv_scale=None)) == Bar("us", 12.5)  # latency has its own for 16 bits


def test_peers_are_the_rows_of_the_published_table():
    cases = peers_cases()
    assert len(cases) == len(set(cases)) == 12 * 2 * 2
    assert {(case.dtype, case.kv_dtype, case.page_size) for case in cases} == {
        ("bf16", kv_dtype, page) for kv_dtype in (None, "e4m3") for page in (16, 64)
    }
    names = {case.name for case in cases}
    assert "gqa_paged_decode_h16_kv8_d256_ps64_bf16_kve4m3_b32_l4k" in names
    assert "gqa_paged_decode_h32_kv8_d128_ps16_bf16_b64_loguniform128-32k" in names
    assert len(case_sets()["core"]) == 4 * 2 * 38


def test_appends():
    cases = append_cases()
    assert len(cases) == 3 * 2 * 2 and case_sets()["append"] == tuple(cases)
    int8 = append_case(8192, kv_dtype="int8", kv_scale="token-f16", layout="NHD")
    assert int8.name == "kv_append_kv8_d128_ps16_bf16_kvint8_token-f16_nhd_t8k" and int8.floor == "copy"
    assert bar_of(int8).met(100.0, 85.1) and not bar_of(int8).met(100.0, 84.9)
    assert bar_of(append_case(64)) == Bar("us", 4.0)
    assert [case.name for case in select_cases(["kv_append_*_t64"])] == [case.name for case in cases if case.batch_size == 64]


def test_bars():
    assert Bar("ratio", 1.06).met(106.0, 100.0) is True
    assert Bar("ratio", 1.06).met(106.1, 100.0) is False
    assert Bar("ratio", 1.06).met(106.1, None) is None
    assert Bar("ratio", 1.08, 3.0).met(111.0, 100.0) is True
    assert Bar("ratio", 1.08, 3.0).met(111.1, 100.0) is False
    assert bar_of(Case(32, 8, 128, 16, Rows(((1, 131072), (31, 4096))))) == Bar("ratio", 1.08, 3.0)
    assert Bar("us", 16).met(16.0, None) is True
    assert Bar("us", 16).met(16.1, 1.0) is False


def test_select_by_set_and_glob_without_repeats():
    assert [case.page_size for case in select_cases(["*_h32_kv8_d128_ps*_bf16_b1_l16k"])] == [16, 64, 1, 2, 4, 8, 32, 128, 256]
    assert len(select_cases(["throughput", "*ps16_bf16_b64_l8k", "throughput"])) == len(
        set(select_cases(["throughput", "*ps16_bf16_b64_l8k"]))
    )
    assert [case.name for case in select_cases(["gqa_paged_decode_h64_kv4_*_b1_l1k"])] == [
        "gqa_paged_decode_h64_kv4_d128_ps16_bf16_b1_l1k"
    ]
    with pytest.raises(ValueError, match="'nothing' is neither a set"):
        select_cases(["throughput", "nothing"])


def test_weights():
    cases = case_sets()["weights"]
    assert len(cases) == 3 * 6 and cases[0] == weights_case(fixed(64, 8192))
    assert cases[0].name == "gqa_paged_weights_h32_kv8_d128_ps16_bf16_b64_l8k" and cases[0].floor == "read"
    assert bar_of(cases[0]) == Bar("ratio", 1.15) and bar_of(replace(cases[0], kv_dtype="e4m3")) is None
