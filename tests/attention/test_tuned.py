"""Tuned plan tables: what is found, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import cute_kernels as ck
from cute_kernels.attention.choice import tuned
from cute_kernels.attention.choice.tuning import FLOOR
from cute_kernels.attention.descriptors import DecodeProblem
from cute_kernels.attention.kernel_spec import kernel_spec
from cute_kernels.attention.variants import explain as explain_problem
from cute_kernels.config.decode import DecodeConfig
from cute_kernels.config.limits import supports
from cute_kernels.planning import variants as dispatch

ENTRY = {
    "arch": "sm90",
    "source": "paged",
    "head_dim": 128,
    "group_size": 4,
    "page_size": 16,
    "kv_dtype": "bf16",
    "k_scale": "none",
    "v_scale": "none",
    "num_kv_heads": [1, 9],
    "batch_size": [1, 65],
    "max_seq_len": [4096, None],
    "config": {"tile_n": 32, "num_stages": 8, "num_warps": 4, "ctas_per_sm": 2},
}


def problem(**changes):
    fields = {"batch_size": 64, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "q_dtype": torch.bfloat16}
    return ck.PagedDecodeDescriptor(**{**fields, "max_seq_len": 8192, **changes}).problem


def write(folder: Path, *entries: object, **document: object) -> Path:
    path = folder / "h200.json"
    path.write_text(json.dumps({"schema": 1, "gpu": "NVIDIA H200", "entries": entries, **document}))
    tuned.load.cache_clear()
    return path


def test_shipped_tables_are_valid() -> None:
    paths = sorted(tuned.plans_folder().glob("*.json"))
    assert "h200.json" in [path.name for path in paths]
    for path in paths:
        tuned.load(path)


def problem_of(entry: tuned.Entry) -> DecodeProblem:
    """A problem that an entry serves: the first of each bucket."""
    exact = dict(zip(tuned.EXACT, entry.exact, strict=True))
    kv_heads, batch, length = (bucket.low for bucket in entry.buckets)
    names = ("NONE", "TENSOR", "HEAD", "TOKEN", "TOKEN_F16")
    scales = {str(getattr(ck.KVScale, name)): getattr(ck.KVScale, name) for name in names}
    kv_dtype, _, v_dtype = exact["kv_dtype"].partition("/")
    q_dtype = torch.float16 if kv_dtype == "f16" or v_dtype == "f16" else torch.bfloat16
    storage = {
        "kv_dtype": ck.KVDtype(kv_dtype),
        "v_dtype": ck.KVDtype(v_dtype or kv_dtype),
        "k_scale": scales[exact["k_scale"]],
        "v_scale": scales[exact["v_scale"]],
    }
    shape = (batch, kv_heads * exact["group_size"], kv_heads)
    if exact["source"] == "contiguous":
        return ck.FlashDecodingDescriptor(*shape, length, exact["head_dim"], q_dtype, **storage).problem
    described = ck.PagedDecodeDescriptor(*shape, exact["head_dim"], exact["page_size"], q_dtype, **storage, max_seq_len=length)
    return described.problem


def check_entry(entry: tuned.Entry, gpu: str = "h200") -> None:
    """An entry is measured, worth its line, and names a configuration that can be built for the problems it serves."""
    assert entry.measured is not None
    assert entry.measured.us <= (1 - FLOOR) * entry.measured.heuristic_us
    arch, problem = entry.exact[0], problem_of(entry)
    assert entry.matches(problem, arch)
    (target,) = (variant.target(dispatch.PRETEND[gpu]) for variant in dispatch.VARIANTS if variant.arch == arch)
    assert supports(kernel_spec(problem, arch, target, entry.config, partition="balanced")) == []


def test_every_shipped_entry_can_be_built_and_beats_the_heuristic() -> None:
    for path in sorted(tuned.plans_folder().glob("*.json")):
        for entry in tuned.load(path):
            check_entry(entry, path.stem)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"source": "contiguous", "page_size": 0},
        {"kv_dtype": "int8", "k_scale": "token f16", "v_scale": "token f16"},
        {"kv_dtype": "e4m3/bf16", "k_scale": "head"},
        {"kv_dtype": "f16", "arch": "sm80", "config": {"tile_n": 16, "num_stages": 8, "num_warps": 4, "ctas_per_sm": 2}},
    ],
)
def test_the_check_of_shipped_entries_finds_what_is_wrong(tmp_path: Path, changes: dict) -> None:
    good = {**ENTRY, "us": 90.0, "heuristic_us": 100.0, "commit": "abc", **changes}
    check_entry(*tuned.load(write(tmp_path, good)))
    for bad in ({"us": 99.0}, {"config": {**good["config"], "num_stages": 512}}):
        with pytest.raises(AssertionError):
            check_entry(*tuned.load(write(tmp_path, {**good, **bad})))


def test_forced_configurations_pass_the_tables_by(tmp_path: Path) -> None:
    write(tmp_path, ENTRY)
    config = DecodeConfig(tile_n=16, num_stages=8, num_warps=8, ctas_per_sm=1)
    with tuned.forced(config):
        assert tuned.lookup(problem(), "sm90", "h200", tmp_path) == config
        assert explain_problem(problem(), dispatch.PRETEND["h200"]).chosen.config == config
        with tuned.forced(None):
            assert tuned.lookup(problem(), "sm90", "h200", tmp_path) is None
        assert tuned.lookup(problem(page_size=64), "sm80", "h200", tmp_path) == config
    assert tuned.lookup(problem(), "sm90", "h200", tmp_path) == DecodeConfig(**ENTRY["config"])


def test_lookup_matches_half_open_buckets(tmp_path: Path) -> None:
    write(tmp_path, ENTRY)
    config = DecodeConfig(tile_n=32, num_stages=8, num_warps=4, ctas_per_sm=2)
    assert tuned.lookup(problem(), "sm90", "h200", tmp_path) == config
    assert tuned.lookup(problem(max_seq_len=4096), "sm90", "h200", tmp_path) == config
    misses = [{"batch_size": 65}, {"max_seq_len": 4095}, {"max_seq_len": None}, {"page_size": 64}, {"num_heads": 64}]
    misses += [{"num_heads": 36, "num_kv_heads": 9}, {"kv_dtype": ck.KVDtype.E4M3}, {"v_dtype": ck.KVDtype.INT8}]
    misses += [{"k_scale": ck.KVScale.TOKEN}, {"v_scale": ck.KVScale.HEAD}, {"q_dtype": torch.float16}]
    for changes in misses:
        assert tuned.lookup(problem(**changes), "sm90", "h200", tmp_path) is None, changes
    assert tuned.lookup(problem(), "sm80", "h200", tmp_path) is None
    assert tuned.lookup(problem(), "sm90", "a100", tmp_path) is None


def test_knobs_with_a_default_may_be_left_out(tmp_path: Path) -> None:
    paired = {**ENTRY, "config": {**ENTRY["config"], "unit_heads": 2}, "page_size": 64}
    write(tmp_path, ENTRY, paired)
    assert tuned.lookup(problem(), "sm90", "h200", tmp_path).unit_heads == 1
    assert tuned.lookup(problem(page_size=64), "sm90", "h200", tmp_path).unit_heads == 2
    for config in ({**ENTRY["config"], "unit_heads": 0}, {"tile_n": 32, "unit_heads": 1}, {**ENTRY["config"], "heads": 2}, 3):
        with pytest.raises(ck.InvalidPlanTable, match="config"):
            tuned.load(write(tmp_path, {**ENTRY, "config": config}))


def test_dispatch_prefers_a_tuned_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, ENTRY)
    monkeypatch.setattr(tuned, "plans_folder", lambda: tmp_path)
    chosen = explain_problem(problem(), dispatch.PRETEND["h200"]).chosen
    assert chosen.config == DecodeConfig(**ENTRY["config"])
    assert chosen.config_source == "plans/h200.json"


def test_a_tuned_config_that_does_not_fit_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {**ENTRY, "config": {**ENTRY["config"], "num_stages": 512}})
    monkeypatch.setattr(tuned, "plans_folder", lambda: tmp_path)
    chosen = explain_problem(problem(), dispatch.PRETEND["h200"]).chosen
    assert (chosen.variant, chosen.config_source) == ("sm90_tma", "heuristics")


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        ({"head_dim": "128"}, "head_dim"),
        ({"head_dim": True}, "head_dim"),
        ({"arch": 90}, "arch"),
        ({"batch_size": [5, 5]}, "batch_size"),
        ({"batch_size": [-1, 5]}, "batch_size"),
        ({"batch_size": [1]}, "batch_size"),
        ({"max_seq_len": [None, 5]}, "max_seq_len"),
        ({"num_kv_heads": 8}, "num_kv_heads"),
        ({"config": {"tile_n": 32}}, "config"),
        ({"config": {**ENTRY["config"], "ctas_per_sm": 0}}, "ctas_per_sm"),
        ({"extra": 1}, "extra"),
        ({"kv_dtype": None}, "kv_dtype"),
        ({"us": 90.0}, "commit"),
        ({"us": 90.0, "heuristic_us": 90.0, "commit": "abc"}, "must be below heuristic_us"),
        ({"us": 0, "heuristic_us": 90.0, "commit": "abc"}, "us"),
        ({"us": 1.0, "heuristic_us": float("nan"), "commit": "abc"}, "heuristic_us"),
        ({"us": 1.0, "heuristic_us": 90.0, "commit": ""}, "commit"),
    ],
)
def test_malformed_entries(tmp_path: Path, changes: dict, fragment: str) -> None:
    path = write(tmp_path, {**ENTRY, **changes})
    with pytest.raises(ck.InvalidPlanTable, match=fragment):
        tuned.load(path)


def test_malformed_documents(tmp_path: Path) -> None:
    with pytest.raises(ck.InvalidPlanTable, match="schema = 2"):
        tuned.load(write(tmp_path, schema=2))
    with pytest.raises(ck.InvalidPlanTable, match="entries"):
        tuned.load(write(tmp_path, entries={}))
    with pytest.raises(ck.InvalidPlanTable, match="overlap"):
        tuned.load(write(tmp_path, ENTRY, {**ENTRY, "batch_size": [64, 70]}))
    path = write(tmp_path)
    path.write_text("{")
    with pytest.raises(ck.InvalidPlanTable, match="JSON"):
        tuned.load(path)
    path.write_text("[]")
    with pytest.raises(ck.InvalidPlanTable, match="keys"):
        tuned.load(path)
