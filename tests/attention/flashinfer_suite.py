"""FlashInfer's own tests of modifiers and several query rows over our plans: `python -m tests.attention.flashinfer_suite FOLDER`.

FOLDER holds a copy of FlashInfer's tests/ (tests/attention and tests/test_helpers), outside this repository. Their module
flashinfer is a stand-in: attention is ours, and what a test compares with is dense PyTorch. What the wrappers refuse is skipped;
each reason of a skip, theirs and ours, is printed with its count. Tests that FlashInfer expects to fail have to pass.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest
import torch
import typer
from rich.console import Console
from rich.table import Column, Table

import tests
from cute_kernels import Unsupported
from tests.support.flashinfer import stand_in
from tests.support.flashinfer.on_cpu import on_cpu

Every = Annotated[int, typer.Option(help="Run one case of so many.", min=1)]
Share = Annotated[int, typer.Option(help="Which of the --shares of the cases to run.", min=0)]
Shares = Annotated[int, typer.Option(help="Processes that divide the cases.", min=1)]


@dataclass(frozen=True)
class Selected:
    """A test of FlashInfer's, and the names in it that stand for what it compares with."""

    file: str
    name: str
    references: frozenset[str] = frozenset()

    @property
    def node(self) -> str:
        return f"tests/attention/{self.file}::{self.name}"


DECODE, PREFILL = frozenset({"single_decode_with_kv_cache"}), frozenset({"single_prefill_with_kv_cache"})
PAGED_PREFILL = frozenset({"BatchPrefillWithPagedKVCacheWrapper"})
PAGED_DECODE = (
    Selected("test_batch_decode_kernels.py", "test_cuda_graph_uniform_multi_token_decode_with_paged_kv_cache", PAGED_PREFILL),
    Selected("test_attention_sink.py", "test_attention_sink"),
    Selected("test_attention_sink.py", "test_attention_sink_incremental_generation"),
    Selected("test_attention_sink.py", "test_attention_sink_chunk_prefill"),
    Selected("test_attention_sink.py", "test_attention_sink_varlen"),
    Selected("test_logits_cap.py", "test_single_decode_logits_soft_cap"),
    Selected("test_alibi.py", "test_single_decode_alibi"),
    Selected("test_sliding_window.py", "test_single_decode_sliding_window"),
    Selected("test_sliding_window.py", "test_batch_decode_sliding_window", DECODE),
)
MORE = (
    Selected("test_batch_decode_kernels.py", "test_batch_decode_with_paged_kv_cache", DECODE),
    Selected("test_batch_decode_kernels.py", "test_batch_decode_with_tuple_paged_kv_cache", DECODE),
    Selected("test_batch_decode_kernels.py", "test_cuda_graph_batch_decode_with_paged_kv_cache", DECODE),
    Selected("test_batch_decode_kernels.py", "test_paged_decode_extreme_negative_logits"),
    Selected("test_batch_prefill_kernels.py", "test_paged_prefill_fully_masked_rows"),
    Selected("test_batch_prefill_kernels.py", "test_ragged_prefill_one_valid_key"),
    Selected("test_logits_cap.py", "test_single_prefill_logits_soft_cap"),
    Selected("test_alibi.py", "test_single_prefill_alibi"),
    Selected("test_sliding_window.py", "test_single_decode_prefill_sliding_window_match"),
    Selected("test_sliding_window.py", "test_single_prefill_sliding_window"),
    Selected("test_sliding_window.py", "test_batch_paged_prefill_sliding_window", PREFILL),
    Selected("test_sliding_window.py", "test_batch_ragged_prefill_sliding_window", PREFILL),
    Selected("test_batch_prefill_kernels.py", "test_batch_prefill_with_paged_kv_cache", PREFILL),
    Selected("test_batch_prefill_kernels.py", "test_batch_prefill_with_tuple_paged_kv_cache", PREFILL),
    Selected("test_batch_prefill_kernels.py", "test_batch_prefill_with_paged_kv_cache_custom_mask", PREFILL),
    Selected("test_batch_prefill_kernels.py", "test_batch_prefill_with_ragged_kv_cache", PREFILL),
    Selected("test_batch_prefill_kernels.py", "test_paged_prefill_split_kv_empty_chunk"),
    Selected("test_decode_fp8_calibration_scale.py", "test_single_decode_fp8_calibration_scale"),
    Selected("test_decode_fp8_calibration_scale.py", "test_batch_decode_with_paged_kv_cache_fp8_calibration_scale"),
    Selected("test_decode_prefill_lse.py", "test_mlc_failed_case"),
    Selected("test_non_contiguous_decode.py", "test_batch_paged_decode_packed_input"),
    Selected("test_non_contiguous_prefill.py", "test_batch_paged_prefill_packed_input"),
    Selected("test_non_contiguous_prefill.py", "test_batch_ragged_prefill_packed_input"),
    Selected("test_page.py", "test_append_paged_kv_cache"),
    Selected("test_shared_prefix_kernels.py", "test_merge_state_in_place_with_mask"),
    Selected("test_tensor_cores_decode.py", "test_batch_decode_tensor_cores"),
    Selected("test_tensor_cores_decode.py", "test_batch_decode_tensor_cores_cuda_graph"),
)


@dataclass
class Suite:
    """The pytest plugin: chooses the cases, assigns the names of each test, and counts."""

    selected: tuple[Selected, ...]
    every: int
    share: int
    shares: int
    device: str
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    reasons: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        some = items[:: self.every]
        items[:] = some[len(some) * self.share // self.shares : len(some) * (self.share + 1) // self.shares]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        name = item.name.partition("[")[0]
        chosen = next(s for s in self.selected if s.name == name and s.file == item.path.name)
        stand_in.assign(chosen.references)
        with on_cpu() if self.device == "cpu" else nullcontext():
            try:
                yield
            except Unsupported as error:
                pytest.skip(str(error))

    def pytest_runtest_teardown(self) -> None:
        if self.device != "cpu":
            torch.cuda.empty_cache()  # some cases take 32 GB, and other processes run the other shares

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            node = report.nodeid.partition("[")[0].rpartition("/")[2]
            self.counts.setdefault(node, Counter())[report.outcome] += 1
            if report.skipped:
                assert isinstance(report.longrepr, tuple)
                self.reasons[report.longrepr[2].removeprefix("Skipped: ")] += 1
            elif report.failed:
                self.failures.append(report.nodeid)

    def show(self, console: Console) -> None:
        """A line a test, then each reason of a skip with its count, then the failures."""
        outcomes = ("passed", "failed", "skipped")
        table = Table(Column("test", overflow="fold"), *outcomes)
        for node, counts in [*self.counts.items(), ("all", sum(self.counts.values(), Counter()))]:
            table.add_row(node, *(str(counts[outcome]) for outcome in outcomes))
        console.print(table)
        for reason, count in self.reasons.most_common():
            console.print(f"{count} skipped: {reason}", markup=False, soft_wrap=True)
        for node in self.failures:
            console.print(f"FAILED {node}", style="red", markup=False, soft_wrap=True)


def run(
    folder: Annotated[Path, typer.Argument(help="Holds a copy of FlashInfer's tests/.", exists=True, file_okay=False)],
    every: Every = 1,
    share: Share = 0,
    shares: Shares = 1,
    device: Annotated[str, typer.Option(help="cuda, or cpu: the tests' cuda:0 is then the CPU.")] = "cuda",
    only: Annotated[str, typer.Option(help="A part of the names of the tests to run.")] = "",
    more: Annotated[bool, typer.Option(help="Also decode without modifiers, prefill, pages, merges.")] = False,
) -> None:
    """Runs FlashInfer's tests over our plans and prints the counts; fails where one fails or none is found."""
    selected = tuple(s for s in (*PAGED_DECODE, *(MORE if more else ())) if only in s.node)
    if not selected:
        raise typer.BadParameter(f"no test has {only!r} in its name", param_hint="--only")
    folder = folder.resolve()
    stand_in.put_in_place()
    tests.__path__.append(str(folder / "tests"))  # their files import tests.test_helpers
    suite = Suite(selected, every, share, shares, device)
    nodes = [str(folder / s.node) for s in selected]
    options = ["-q", "--tb=short", "--runxfail", "--noconftest", "--import-mode=importlib", "-p", "no:cacheprovider"]
    options += ["-p", "no:xdist", "-W", "ignore::pytest.PytestUnknownMarkWarning", "-c", "/dev/null", f"--rootdir={folder}"]
    status = pytest.main([*options, *nodes], plugins=[suite])
    suite.show(Console(highlight=False))
    sys.exit(int(status))


if __name__ == "__main__":
    typer.run(run)
