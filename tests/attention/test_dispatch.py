"""The choice of a variant on pretended devices, with its reasons; nothing is compiled."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product

import pytest
import torch

import cute_kernels as ck
from cute_kernels.attention.choice import heuristics
from cute_kernels.attention.choice.cost_model import predict_us
from cute_kernels.attention.kernel_spec import kernel_spec
from cute_kernels.attention.variants import explain, grid_of, misfits, regions_of
from cute_kernels.attention.workspace import CLAIMS, workspace_bytes
from cute_kernels.config.decode import DecodeConfig
from cute_kernels.config.limits import supports
from cute_kernels.planning.variants import PRETEND, VARIANTS, DeviceFacts
from tests.support.attention_cases import CASES, F32_CASES

H200, A100, CPU = PRETEND["h200"], PRETEND["a100"], PRETEND["cpu"]
E4M3, E5M2, INT8 = ck.KVDtype.E4M3, ck.KVDtype.E5M2, ck.KVDtype.INT8
STORAGES = {
    "16 bits": {},
    "e4m3": {"kv_dtype": E4M3},
    "int8 token": {"kv_dtype": INT8, "k_scale": ck.KVScale.TOKEN_F16, "v_scale": ck.KVScale.TOKEN_F16},
    "bf16/e5m2": {"v_dtype": E5M2},
}


def problem(**changes):
    fields = {"batch_size": 4, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "q_dtype": torch.bfloat16}
    return ck.PagedDecodeDescriptor(**{**fields, **changes}).problem


def chosen(facts, preference=None, **changes):
    return explain(problem(**changes), facts, preference).chosen


def test_the_first_variant_that_serves_is_taken() -> None:
    assert [variant.name for variant in VARIANTS] == ["sm90_tma", "sm80_cp_async", "cpu_reference"]
    assert chosen(H200).variant == "sm90_tma"
    assert chosen(A100).variant == "sm80_cp_async"
    assert chosen(CPU).variant == "cpu_reference"


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("page_size", [8, 16, 64, 128, 1024])
def test_tma_serves_the_fast_shapes(head_dim: int, page_size: int) -> None:
    assert chosen(H200, head_dim=head_dim, page_size=page_size).variant == "sm90_tma"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"page_size": 1}, "page_size"),
        ({"page_size": 5}, "page_size"),
        ({"page_size": 1, **STORAGES["e4m3"]}, "page_size"),
        ({"page_size": 5, **STORAGES["int8 token"]}, "page_size"),
        ({"head_dim": 100}, "head_dim"),
        ({"layout": ck.KVLayout.HND.with_alignment(8)}, "16-byte"),
    ],
)
def test_what_tma_cannot_take_goes_to_cp_async(changes: dict, reason: str) -> None:
    explanation = explain(problem(**changes), H200)
    assert explanation.chosen.variant == "sm80_cp_async"
    assert explanation.chosen.spec.target == "sm_90a"
    assert any(reason in text for text in explanation.candidates[0].reasons)


@pytest.mark.parametrize("facts", [H200, A100], ids=["h200", "a100"])
@pytest.mark.parametrize("head_dim", [1, 7, 16, 40, 64, 96, 100, 128, 192, 255, 256])
@pytest.mark.parametrize("group_size", [1, 4, 5, 16, 128])
def test_every_head_dim_and_group_has_a_variant(facts, head_dim: int, group_size: int) -> None:
    for page_size, storage in product((1, 5, 16, 17, 1024), ("16 bits", "e4m3", "int8 token")):
        shape = {"head_dim": head_dim, "num_heads": group_size, "num_kv_heads": 1, "page_size": page_size}
        candidate = chosen(facts, **shape, **STORAGES[storage])
        assert supports(candidate.spec) == []
        assert (candidate.spec.group_size, candidate.spec.page_size) == (group_size, page_size)


def test_every_reason_of_every_variant_is_given() -> None:
    with pytest.raises(ck.Unsupported) as caught:
        _ = explain(problem(head_dim=300, kv_dtype=E4M3), H200).chosen
    text = str(caught.value)
    for part in (
        "sm90_tma: TMA needs head_dim to be a multiple of 32, got 300",
        "sm90_tma: head_dim=300",
        "sm80_cp_async: head_dim=300",
        "cpu_reference: runs on the cpu",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("facts", "variant"), [(CPU, "cpu_reference"), (H200, "sm90_tma"), (A100, "sm80_cp_async")], ids=["cpu", "h200", "a100"]
)
def test_float32_runs_on_each_device(facts: DeviceFacts, variant: str) -> None:
    candidate = chosen(facts, q_dtype=torch.float32)
    assert candidate.variant == variant
    if facts is not CPU:
        assert (candidate.spec.element_type, candidate.spec.k_type, candidate.spec.v_type) == ("f32",) * 3


@pytest.mark.parametrize("facts", [H200, A100], ids=["h200", "a100"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"q_dtype": torch.float32, "kv_dtype": E4M3}, "kv_dtype = e4m3: beside q_dtype = torch.float32"),
        ({"q_dtype": torch.float32, "kv_dtype": ck.KVDtype.BF16}, "kv_dtype = bf16: beside q_dtype = torch.float32"),
        ({"q_dtype": torch.float32, "v_dtype": INT8}, "v_dtype = int8: beside q_dtype = torch.float32"),
        ({"q_dtype": torch.float32, "v_scale": ck.KVScale.HEAD}, "k_scale, v_scale: caches of f32 take none"),
        ({"kv_dtype": ck.KVDtype.F32}, "kv_dtype = f32: must be q's"),
    ],
    ids=["e4m3", "bf16", "v_int8", "scale", "f32_under_bf16"],
)
def test_what_float32_is_not_combined_with(changes: dict, reason: str, facts: DeviceFacts) -> None:
    with pytest.raises(ck.Unsupported) as caught:
        chosen(facts, **changes)
    assert reason in str(caught.value)


@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2, INT8], ids=lambda d: d.value)
@pytest.mark.parametrize(("facts", "variant"), [(H200, "sm90_tma"), (A100, "sm80_cp_async")], ids=["h200", "a100"])
def test_8_bit_caches_run_on_the_tensor_cores(facts: DeviceFacts, variant: str, kv_dtype: ck.KVDtype) -> None:
    """K and V each, with 16 bits for the other; the spec says what each is stored as, and q's type stays."""
    for changes, stored in (
        ({"kv_dtype": kv_dtype}, (kv_dtype.value, kv_dtype.value)),
        ({"kv_dtype": kv_dtype, "v_dtype": ck.KVDtype.BF16}, (kv_dtype.value, "bf16")),
        ({"v_dtype": kv_dtype}, ("bf16", kv_dtype.value)),
    ):
        candidate = chosen(facts, **changes)
        assert candidate.variant == variant
        assert (candidate.spec.k_type, candidate.spec.v_type, candidate.spec.element_type) == (*stored, "bf16")
        assert (candidate.spec.k_scale, candidate.spec.v_scale) == ("none", "none")
        assert supports(candidate.spec) == []
    assert chosen(CPU, kv_dtype=kv_dtype).variant == chosen(CPU, v_dtype=kv_dtype).variant == "cpu_reference"


@pytest.mark.parametrize(
    ("head_dim", "storage", "reason"),
    [
        (80, {"kv_dtype": E4M3}, "TMA needs head_dim to be a multiple of 32, got 80"),
        (80, {"kv_dtype": INT8, "v_dtype": ck.KVDtype.BF16}, "TMA needs head_dim to be a multiple of 32, got 80"),
        (100, {"kv_dtype": INT8}, "TMA needs 16-byte aligned strides, got 4"),
        (33, {"kv_dtype": E5M2}, "TMA needs 16-byte aligned strides, got 1"),
    ],
    ids=["d80", "d80 int8/bf16", "d100", "d33"],
)
def test_head_dims_of_8_bits_that_tma_cannot_take_go_to_cp_async(head_dim: int, storage: dict, reason: str) -> None:
    explanation = explain(problem(head_dim=head_dim, **storage), H200)
    assert explanation.chosen.variant == "sm80_cp_async"
    assert supports(explanation.chosen.spec) == []
    assert reason in explanation.candidates[0].reasons
    with pytest.raises(ck.Unsupported, match=reason):
        chosen(H200, ck.PlanPreference(arch="sm90"), head_dim=head_dim, **storage)


def test_a_head_of_an_odd_number_of_columns_may_not_mix_8_and_16_bits() -> None:
    """No load that divides its 33 bytes holds an element of 2."""
    mixed = {"head_dim": 33, "kv_dtype": INT8, "v_dtype": ck.KVDtype.BF16}
    for facts in (H200, A100):
        with pytest.raises(ck.Unsupported, match="vector_bytes=1 is less than an element of 2 bytes"):
            chosen(facts, **mixed)
    assert chosen(CPU, **mixed).variant == "cpu_reference"


@pytest.mark.parametrize("facts", [H200, A100], ids=["h200", "a100"])
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2, INT8], ids=lambda d: d.value)
def test_8_bit_heads_over_256_columns_are_refused(kv_dtype: ck.KVDtype, facts: DeviceFacts) -> None:
    for storage in ({"kv_dtype": kv_dtype}, {"v_dtype": kv_dtype}):
        with pytest.raises(ck.Unsupported, match=r"head_dim=257 is outside 1\.\.256"):
            chosen(facts, head_dim=257, **storage)


@pytest.mark.parametrize("name", ["kv_dtype", "v_dtype"])
def test_a_16_bit_cache_has_the_dtype_of_q(name: str) -> None:
    for facts in (H200, A100, CPU):
        with pytest.raises(ck.Unsupported, match=f"{name} = f16: must be q's, bf16"):
            chosen(facts, **{name: ck.KVDtype.F16})
        with pytest.raises(ck.Unsupported, match=f"{name} = f32: must be q's, bf16, or an 8-bit one"):
            chosen(facts, **{name: ck.KVDtype.F32})


@pytest.mark.parametrize("kv_dtype", [None, INT8], ids=["bf16", "int8"])
@pytest.mark.parametrize(
    ("scale", "form"),
    [
        (ck.KVScale.NONE, "none"),
        (ck.KVScale.TENSOR, "head"),
        (ck.KVScale.HEAD, "head"),
        (ck.KVScale.TOKEN, "token_f32"),
        (ck.KVScale.TOKEN_F16, "token_f16"),
    ],
    ids=str,
)
def test_scales_run_on_the_tensor_cores(scale: ck.KVScale, form: str, kv_dtype: ck.KVDtype | None) -> None:
    """K's and V's apart. One scale for all is read as one a KV head is: the same kernel."""
    for facts, variant in ((H200, "sm90_tma"), (A100, "sm80_cp_async")):
        for name, forms in (("k_scale", (form, "none")), ("v_scale", ("none", form))):
            candidate = chosen(facts, kv_dtype=kv_dtype, **{name: scale})
            assert candidate.variant == variant
            assert (candidate.spec.k_scale, candidate.spec.v_scale) == forms
            assert supports(candidate.spec) == []
    assert chosen(CPU, kv_dtype=kv_dtype, k_scale=scale, v_scale=scale).variant == "cpu_reference"


def test_a_forced_variant_is_taken_or_refused_never_replaced() -> None:
    assert chosen(H200, ck.PlanPreference(arch="sm80")).variant == "sm80_cp_async"
    with pytest.raises(ck.Unsupported, match=r"capability 9\.0"):
        chosen(A100, ck.PlanPreference(arch="sm90"))
    with pytest.raises(ck.Unsupported, match="runs on the cpu"):
        chosen(H200, ck.PlanPreference(arch="cpu"))
    for storage, page_size in product(STORAGES.values(), (1, 5)):
        with pytest.raises(ck.Unsupported, match=f"page_size to be a multiple of 8, got {page_size}"):
            chosen(H200, ck.PlanPreference(arch="sm90"), page_size=page_size, **storage)


def test_rows_stay_whole_where_the_workspace_is_too_small() -> None:
    free = chosen(H200, batch_size=1, max_seq_len=131_072)
    assert free.spec.partition == "balanced"
    needed = workspace_bytes(problem(batch_size=1), free.num_ctas, "balanced", free.spec.state_words)
    assert needed > 0
    fits = chosen(H200, ck.PlanPreference(max_workspace_bytes=needed), batch_size=1, max_seq_len=131_072)
    assert fits == free
    none = chosen(H200, ck.PlanPreference(max_workspace_bytes=needed - 1), batch_size=1, max_seq_len=131_072)
    assert (none.spec.partition, none.spec.split) == ("whole", False)
    assert f"{needed:,} workspace bytes" in none.config_source


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("batch", "length"), [(1, 131_072), (8, 8192), (33, 4096)])
def test_what_explain_counts_is_what_runs(storage: str, batch: int, length: int) -> None:
    """Without a workspace, the cost and the choice are those of whole rows; else of cut ones."""
    shape = {"batch_size": batch, "max_seq_len": length, **STORAGES[storage]}
    for limit, partition in ((None, "balanced"), (0, "whole")):
        candidate = chosen(H200, ck.PlanPreference(max_workspace_bytes=limit), **shape)
        arguments = (problem(**shape), candidate.config, "sm90", "sm_90a", 132, partition)
        assert candidate.spec.partition == partition and candidate.cost == predict_us(*arguments)
        assert candidate.config == heuristics.choose(problem(**shape), "sm90", "sm_90a", 132, partition)
        assert (candidate.cost.parts == 1) == (partition == "whole")
    units = 8 // candidate.spec.unit_heads
    assert candidate.num_ctas == units * (132 * candidate.config.ctas_per_sm // units)
    printed = str(explain(problem(**shape), H200, ck.PlanPreference(max_workspace_bytes=0)))
    assert f"modelled {candidate.cost.total_us:.1f} us" in printed


def test_batch_invariant_rows_are_cut_by_their_own_length() -> None:
    """The partition is the invariant one, whole only where its workspace is refused; the spec does not see batch or lengths."""
    shapes = [{"batch_size": b, "max_seq_len": length} for b in (1, 2, 64, 500) for length in (None, 64, 131_072)]
    specs = {chosen(H200, ck.PlanPreference(batch_invariant=True), **shape).spec for shape in shapes}
    assert len(specs) == 1
    assert specs.pop().partition == "invariant"
    free = chosen(H200, ck.PlanPreference(batch_invariant=True))
    needed = workspace_bytes(problem(), free.num_ctas, "invariant", free.spec.state_words)
    assert needed > workspace_bytes(problem(), free.num_ctas, "balanced", free.spec.state_words)
    for limit, partition in ((needed, "invariant"), (needed - 1, "whole")):
        candidate = chosen(H200, ck.PlanPreference(batch_invariant=True, max_workspace_bytes=limit))
        assert (candidate.spec.partition, candidate.config) == (partition, free.config)


@pytest.mark.parametrize("storage", sorted(STORAGES))
@pytest.mark.parametrize("heads", [(32, 1), (64, 2), (32, 8)], ids=str)
def test_no_phase_of_an_invariant_plan_sees_the_batch_or_its_lengths(heads: tuple[int, int], storage: str) -> None:
    """A kernel for requests of few and of many query rows: all phases are the same for every batch and length hint."""
    specs = set()
    for batch, longest in product((1, 8, 64, 500), (None, 64, 131_072)):
        fields = {"q_dtype": torch.bfloat16, "max_q_len": 64, "max_seq_len": longest, **STORAGES[storage]}
        described = ck.PagedAttentionDescriptor(batch, *heads, 128, 16, **fields).problem
        candidate = explain(described, H200, ck.PlanPreference(batch_invariant=True)).chosen
        specs.add(tuple(phase.spec for phase in candidate.phases or (candidate,)))
    assert len(specs) == 1


@pytest.mark.parametrize("invariant", [False, True], ids=["default", "invariant"])
@pytest.mark.parametrize("sm_count", [1, 3, 8, 131, 132])
def test_a_part_of_a_device_has_the_variant_of_the_whole(sm_count: int, invariant: bool) -> None:
    """Also where units fill the SMs and whole rows are dealt: no problem falls to another variant for want of a configuration."""
    facts, preference = ck.PlanPreference(sm_count=sm_count).part_of(H200), ck.PlanPreference(batch_invariant=invariant)
    for described in (case for case in (*CASES, *F32_CASES) if case.tma):
        assert explain(described.descriptor().problem, facts, preference).chosen.variant == "sm90_tma", described.name


def test_a_grid_has_a_limit() -> None:
    """So many query rows would need more CTAs than a launch may have: each variant that would launch them says so."""
    described = ck.PagedAttentionDescriptor(2, 256, 64, 128, 16, torch.bfloat16, max_q_len=2**29 - 32).problem
    explanation = explain(described, A100, ck.PlanPreference(batch_invariant=True))
    refused = [candidate for candidate in explanation.candidates if candidate.arch == "sm80"]
    assert all("CTAs exceed a grid's 2**31 - 1" in str(candidate.reasons) for candidate in refused), explanation


@pytest.mark.parametrize("sm_count", [1, 7, 64, 131, 132])
@pytest.mark.parametrize("storage", sorted(STORAGES))
def test_regions_are_the_whole_workspace(storage: str, sm_count: int) -> None:
    """Each begins where the one before it ends, and those of a phase end on a cache line: their sum is the size.

    A mixed kernel whose CTAs claim items has a line more.
    """
    facts = ck.PlanPreference(sm_count=sm_count).part_of(H200)
    for max_q_len, head_dim, invariant in product((1, 4, 300), (40, 128), (False, True)):
        described = ck.PagedAttentionDescriptor(
            5, 12, 3, head_dim, 16, torch.bfloat16, max_q_len=max_q_len, max_seq_len=5000, **STORAGES[storage]
        ).problem
        candidate = explain(described, facts, ck.PlanPreference(batch_invariant=invariant)).chosen
        claims = bool(candidate.phases) and candidate.phases[-1].spec.claims
        end = CLAIMS.nbytes if claims else 0
        for phase in candidate.phases or (candidate,):
            end += workspace_bytes(*grid_of(described, phase))
            assert end % 128 == 0
        regions, begin = regions_of(described, candidate), 0
        assert (regions[:1] == (CLAIMS,)) is claims
        for region in regions:
            assert region.offset == begin, regions
            begin += region.nbytes
        assert begin == end


def test_the_spec_is_what_changes_generated_code() -> None:
    """batch, heads and lengths are not in it; everything else is."""
    config = DecodeConfig(tile_n=64, num_stages=4, num_warps=4, ctas_per_sm=1)

    def spec(**changes):
        return kernel_spec(problem(**changes), "sm90", "sm_90a", config, partition="balanced")

    assert spec() == spec(batch_size=9) == spec(num_heads=16, num_kv_heads=4) == spec(max_seq_len=5)
    changes = [
        {"page_size": 64},
        {"head_dim": 64},
        {"num_heads": 16},
        {"q_dtype": torch.float16},
        {"table_format": "csr"},
        {"lse_base": "2"},
        {"layout": ck.KVLayout.HND.with_alignment(4)},
        *({"kv_dtype": dtype} for dtype in (E4M3, E5M2, INT8)),
        {"v_dtype": E4M3},
        *(
            {name: scale}
            for name in ("k_scale", "v_scale")
            for scale in (ck.KVScale.HEAD, ck.KVScale.TOKEN, ck.KVScale.TOKEN_F16)
        ),
    ]
    assert len({spec(), *(spec(**change) for change in changes)}) == len(changes) + 1
    partitions = [kernel_spec(problem(), "sm90", "sm_90a", config, partition=p) for p in ("whole", "balanced", "invariant")]
    assert [candidate.split for candidate in partitions] == [False, True, True]
    assert len(set(partitions)) == 3


PAIRED = DecodeConfig(tile_n=32, num_stages=16, num_warps=8, ctas_per_sm=1, unit_heads=2)
TOKEN_SCALES = {"kv_dtype": INT8, "k_scale": ck.KVScale.TOKEN_F16, "v_scale": ck.KVScale.TOKEN_F16}


def test_two_kv_heads_a_cta_are_for_long_streams_with_scales_a_token() -> None:
    large, small = (chosen(H200, batch_size=rows, max_seq_len=4096, **TOKEN_SCALES) for rows in (128, 8))
    assert (large.config, large.num_ctas) == (PAIRED, 132), "4 units leave no SM of 132 idle, 8 leave 4"
    assert (small.config.unit_heads, small.num_ctas) == (1, 128)
    assert large.spec.packed_rows == 2 * small.spec.packed_rows == 8
    others = [
        {"k_scale": ck.KVScale.HEAD},
        {"v_scale": ck.KVScale.TENSOR},
        {"num_heads": 64},
        {"num_heads": 36, "num_kv_heads": 9},
    ]
    others += [{"head_dim": 256}, {"k_scale": ck.KVScale.NONE, "v_scale": ck.KVScale.NONE}, {"page_size": 1}]
    for other in others:
        fields = {"batch_size": 128, "max_seq_len": 4096, **TOKEN_SCALES, **other}
        assert chosen(H200, **fields).config.unit_heads == 1, other


@pytest.mark.parametrize(
    ("arch", "fields", "changes", "reason"),
    [
        ("sm90", {}, {"unit_heads": 4}, "unit_heads=4 is not 1 or 2"),
        ("sm90", {"num_heads": 72}, {}, "9 query heads each exceed the 16 rows"),
        ("sm90", {}, {"num_warps": 1}, "does not divide num_warps=1"),
        ("sm90", {"k_scale": ck.KVScale.HEAD}, {}, "takes no scale a KV head"),
        ("sm80", {}, {}, "needs the TMA mainloop"),
        ("sm90", {"num_heads": 36, "num_kv_heads": 9}, {}, "does not divide num_kv_heads=9"),
    ],
)
def test_where_a_cta_cannot_take_two_kv_heads(arch: str, fields: dict, changes: dict, reason: str) -> None:
    described = problem(**fields)
    spec = kernel_spec(described, arch, "sm_90a", replace(PAIRED, tile_n=16, **changes), partition="balanced")
    (found,) = misfits(described, spec)
    assert reason in found


def test_heuristics_are_a_function_of_the_problem() -> None:
    first = heuristics.choose(problem(max_seq_len=8192), "sm90", "sm_90a", 132)
    assert first == heuristics.choose(problem(max_seq_len=8192), "sm90", "sm_90a", 132)


def test_explanations_print_and_are_data() -> None:
    explanation = explain(problem(page_size=1), H200)
    text = str(explanation)
    for part in ("sm90_tma", "rejected", "page_size", "sm80_cp_async", "chosen", "ctas_per_sm=", "NVIDIA H200", "132 SMs"):
        assert part in text
    data = json.loads(json.dumps(explanation.to_dict()))
    assert [candidate["verdict"] for candidate in data["candidates"]] == ["rejected", "chosen", "rejected"]


@pytest.mark.parametrize(
    ("gpu", "slug"), [("h200", "h200"), ("h100", "h100"), ("a100", "a100"), ("l40s", "l40s"), ("cpu", "cpu")]
)
def test_slugs(gpu: str, slug: str) -> None:
    assert PRETEND[gpu].slug == slug


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize(("gpu", "arch"), [("h200", "sm90"), ("h200", "sm80"), ("a100", "sm80"), ("l40s", "sm80")])
def test_the_heuristic_fits_every_head_and_group(gpu: str, arch: str, storage: str) -> None:
    """No shape is rejected because the heuristic chose a configuration that `supports` refuses."""
    step, shapes = 16 if storage == "16 bits" else 32, ((1, None), (1, 1024), (64, 8192))
    for head_dim, group, (batch, length) in product(range(step, 257, step), (1, 4, 8, 16, 128), shapes):
        heads = {"num_heads": 2 * group, "num_kv_heads": 2, "head_dim": head_dim}
        described = problem(batch_size=batch, **heads, max_seq_len=length, **STORAGES[storage])
        (candidate,) = (c for c in explain(described, PRETEND[gpu], ck.PlanPreference(arch=arch)).candidates if c.arch == arch)
        assert candidate.reasons == ()


@pytest.mark.parametrize("count", [8, 40, 100, 132])
@pytest.mark.parametrize("shape", [{"batch_size": 64, "max_seq_len": 8192}, {"batch_size": 1, "max_seq_len": 131_072}])
def test_a_plan_on_a_part_of_the_gpu_has_a_cta_an_sm(count: int, shape: dict[str, int]) -> None:
    """Of two an SM, each could lie on an SM of its own, so that more SMs are in use than were asked for."""
    preference = ck.PlanPreference(sm_count=count)
    candidate = chosen(preference.part_of(H200), preference, **shape)
    assert (candidate.config.ctas_per_sm, candidate.num_ctas) == (1, count // 8 * 8)
    assert "heuristics" in candidate.config_source
