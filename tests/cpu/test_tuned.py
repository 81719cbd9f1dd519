"""Tuned plan tables: what is found, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import cute_kernels as ck
from cute_kernels import dispatch, tuned
from cute_kernels.config import DecodeConfig

ENTRY = {
    "arch": "sm90",
    "source": "paged",
    "head_dim": 128,
    "group_size": 4,
    "page_size": 16,
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


def test_lookup_matches_half_open_buckets(tmp_path: Path) -> None:
    write(tmp_path, ENTRY)
    config = DecodeConfig(tile_n=32, num_stages=8, num_warps=4, ctas_per_sm=2)
    assert tuned.lookup(problem(), "sm90", "h200", tmp_path) == config
    assert tuned.lookup(problem(max_seq_len=4096), "sm90", "h200", tmp_path) == config
    misses = [{"batch_size": 65}, {"max_seq_len": 4095}, {"max_seq_len": None}, {"page_size": 64}, {"num_heads": 64}]
    misses += [{"num_heads": 36, "num_kv_heads": 9}]
    for changes in misses:
        assert tuned.lookup(problem(**changes), "sm90", "h200", tmp_path) is None, changes
    assert tuned.lookup(problem(), "sm80", "h200", tmp_path) is None
    assert tuned.lookup(problem(), "sm90", "a100", tmp_path) is None


def test_dispatch_prefers_a_tuned_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, ENTRY)
    monkeypatch.setattr(tuned, "plans_folder", lambda: tmp_path)
    chosen = dispatch.explain(problem(), dispatch.PRETEND["h200"]).chosen
    assert chosen.config == DecodeConfig(**ENTRY["config"])
    assert chosen.config_source == "plans/h200.json"


def test_a_tuned_config_that_does_not_fit_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {**ENTRY, "config": {**ENTRY["config"], "num_stages": 512}})
    monkeypatch.setattr(tuned, "plans_folder", lambda: tmp_path)
    chosen = dispatch.explain(problem(), dispatch.PRETEND["h200"]).chosen
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
