"""python -m perf.export: the newest device times in formats that other tools read."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from perf.picture import newest_of, share
from perf.record import H200
from perf.records import Record, read_records
from perf.run import split


class Format(str, Enum):
    """github: the array that github-action-benchmark reads as customSmallerIsBetter.

    workloads: one JSON object per line, with the name of FlashInfer's definition, the axes that vary under it, and the times.
    """

    github = "github"
    workloads = "workloads"


def github(record: Record) -> dict[str, object]:
    """An entry for github-action-benchmark; the range is half the distance of the 20th and 80th percentile."""
    assert record.us is not None
    percent = share(record)
    extra = [record.gpu, record.revision, f"{record.provider} {record.version}"]
    return {
        "name": f"{record.name} ({record.provider})",
        "unit": "us",
        "value": record.us.median,
        "range": f"± {(record.us.p80 - record.us.p20) / 2:.3f}",
        "extra": "\n".join([*extra, *([] if percent is None else [f"{100 / percent:.4f} of a plain read"])]),
    }


def workload(record: Record) -> dict[str, object]:
    """A workload under FlashInfer's definition: gqa_paged_decode_h32_kv8_d128_ps16."""
    assert record.us is not None
    case, percent = record.case, share(record)
    tokens = case.tokens()
    rows = {"q_len": case.q_len} if case.q_len else {}
    if case.mixed:
        rows = {"max_q_len": case.q_rows, "total_q": case.query_shape[0]}
    pages = {"num_pages": sum(-(-length // case.page_size) for length in tokens)} if case.page_size else {}
    return {
        "definition": record.name.split(f"_{case.dtype}")[0],
        "workload": record.name,
        "axes": {"batch_size": case.batch_size, "num_kv_tokens": sum(tokens), "max_seq_len": max(tokens), **rows, **pages},
        "dtype": case.dtype,
        "kv_dtype": record.kv_dtype,
        "solution": record.provider,
        "latency_ms": record.us.median / 1e3,
        "read_latency_ms": None if percent is None else record.us.median / 1e3 * percent / 100,
        "max_absolute_error": record.gate.error if record.gate else None,
        "hardware": record.gpu,
        "commit": record.revision,
    }


def export(records: Iterable[Record], providers: Sequence[str], kind: Format) -> str:
    """The newest time of each case and provider as text. Raises ValueError if there is none."""
    cases = newest_of(records).values()
    timed = [case[provider] for case in cases for provider in providers if provider in case and case[provider].us]
    if not timed:
        raise ValueError(f"providers: {', '.join(providers)!r} has no recorded time")
    if kind is Format.github:
        return json.dumps([github(record) for record in timed], indent=1, ensure_ascii=False) + "\n"
    return "".join(json.dumps(workload(record)) + "\n" for record in timed)


def main(
    results: Annotated[
        Path, typer.Argument(help="Records of perf.run.", exists=True, dir_okay=False, show_default="the checkout's, of the H200")
    ] = H200,
    kind: Annotated[Format, typer.Option("--format", help="What to write.")] = Format.github,
    providers: Annotated[str, typer.Option(help="Whose times, separated by commas.")] = "ours",
    out: Annotated[Path | None, typer.Option(help="The file to write; default: standard output.", dir_okay=False)] = None,
) -> None:
    """Export the newest times; unusable lines are reported and left out. Exit code 2 when there is none."""
    records, problems = read_records([results])
    for problem in problems:
        print(problem, file=sys.stderr)
    try:
        text = export(records, split(providers), kind)
    except ValueError as error:
        print(f"{results}: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    if out is None:
        print(text, end="")
    else:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
