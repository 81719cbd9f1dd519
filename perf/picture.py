"""python -m perf.picture perf/results/h200.jsonl docs/h200.svg: the records as bars, in percent of the plain read's bandwidth.

With --kv-dtype e4m3: those of a bf16 q over an e4m3 cache without scales. With --long: prompts and chunks, in TFLOPS.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from operator import attrgetter
from pathlib import Path
from textwrap import shorten, wrap
from typing import Annotated, get_args
from xml.etree import ElementTree

import typer

from cute_kernels.errors import InvalidArgument
from cute_kernels.options import check_writable
from perf.cases import EightBit
from perf.measure import DEVICE
from perf.ordering import reading_order
from perf.records import Record, read_records

Newest = Mapping[str, Mapping[str, Record]]  # by case name, then by provider

OURS = "ours"
# provider -> legend and the fills of its bars, light and dark, in the order of the bars
PROVIDERS = {
    OURS: ("cute_kernels", "#d9480f", "#ff8c42"),
    "fa3": ("FlashAttention-3", "#4f6d94", "#86a6cf"),
    "fa4": ("flash-attn-4", "#5b8c85", "#7fb8ae"),
    "flashinfer-fa2": ("FlashInfer fa2", "#86a0c0", "#5f7fa8"),
    "flashinfer-xqa": ("FlashInfer XQA", "#b7c6d9", "#43597a"),
    "vllm-triton": ("vLLM Triton", "#a9bfb1", "#4f6b5a"),
    "sdpa": ("PyTorch SDPA, K and V gathered beforehand", "#c9c2b6", "#6f6a61"),
}
VLLM_LIBRARY = "_vllm_fa3_C.abi3.so"  # older records name the file alone
LIBRARY = re.compile(r"(?:(?P<owner>.+)'s )?FA3, sha256 of the \.so (?P<digest>\w+)")
KV_DTYPES = ("bf16", *get_args(EightBit))
MAX_CASES = 13
PAGES = (16, 64)  # page sizes to choose cases from: the first that has any
LONG_PAGES = (0, 64)  # page sizes for long queries, 0 for contiguous: other page sizes are within some percent of these

WIDTH, MARGIN = 900, 32
BARS_LEFT, BARS_RIGHT = 172, 716
VALUE_RIGHT, US_RIGHT = 800, WIDTH - MARGIN
STEP, BAR, GROUP_GAP = 14, 10, 16
TOP, FOOTER, LABEL_STEP, NOTE_STEP = 146, 76, 15, 17
LABEL_CHARACTERS = 21  # the most characters of a line that stays left of the bars
STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", "Helvetica Neue", Arial, sans-serif; fill: #1f2328 }
.card { fill: #ffffff; stroke: #d8dee4 }
.head { font-size: 18px; font-weight: 600 }
.case { font-weight: 600 }
.muted { fill: #59636e }
.small { font-size: 11px }
.ours { font-weight: 600 }
.number { font-size: 11px; font-variant-numeric: tabular-nums }
.grid { stroke: #e7ebef }
.limit { stroke: #1f2328; stroke-dasharray: 4 3 }
""" + "".join(f".bar-{provider} {{ fill: {light} }}\n" for provider, (_, light, _) in PROVIDERS.items())
DARK = """
text { fill: #e6edf3 }
.card { fill: #0d1117; stroke: #30363d }
.muted { fill: #9aa4af }
.grid { stroke: #21262d }
.limit { stroke: #e6edf3 }
""" + "".join(f".bar-{provider} {{ fill: {dark} }}\n" for provider, (_, _, dark) in PROVIDERS.items())


@dataclass(frozen=True)
class Bar:
    """One bar. length: its Measure's value for the record; if it is None, `reason` is written in the bar's place."""

    record: Record
    length: float | None
    reason: str


@dataclass(frozen=True)
class Measure:
    """The quantity that bars show. of: a record's length, or None; lengths are written with `unit` and decimals below `head`.

    words: the meaning of a length, written after it. axis: the title of the axis. ticks: of the axis; all bars have room for the
    last tick. limit: a tick and its text, or None. lacking: why a record without a reason of its own has no length. compare: the
    value to compare if the bars of a case are from several runs.
    """

    title: str
    of: Callable[[Record], float | None]
    head: str
    unit: str
    words: str
    decimals: int
    axis: str
    ticks: tuple[int, ...]
    limit: tuple[int, str] | None
    lacking: str
    compare: str

    def text(self, length: float) -> str:
        """A length in words."""
        return f"{length:.{self.decimals}f}{self.unit}"


def newest_of(records: Iterable[Record]) -> Newest:
    """The newest device time of each case and provider; for equal timestamps the later line. Cases in order of appearance."""
    newest: dict[str, dict[str, Record]] = {}
    for record in records:
        if record.metric != DEVICE:
            continue
        of_case = newest.setdefault(record.name, {})
        if record.provider not in of_case or record.time >= of_case[record.provider].time:
            of_case[record.provider] = record
    return newest


def newest_beside_peers(records: Iterable[Record]) -> Newest:
    """newest_of, but our time of a case is of the newest run in which a peer was timed too, if there is one.

    It serves pictures of times: machines differ, and only ratios to a floor of the same run divide that out.
    """
    timed = [record for record in records if record.metric == DEVICE and record.us is not None]
    runs = {record.run for record in timed if record.provider in PROVIDERS and record.provider != OURS}
    beside = newest_of(record for record in timed if record.provider == OURS and record.run in runs)
    return {name: {**of_case, **beside.get(name, {})} for name, of_case in newest_of(records).items()}


def share(record: Record) -> float | None:
    """Bandwidth in percent of the plain read's in the same run. None without both times, and if the floor is no read."""
    return None if record.us is None or record.ratio is None or record.case.long else 100 / record.ratio


READ = Measure(
    title="Decode attention: read bandwidth reached",
    of=share,
    head="% of read",
    unit="%",
    words="of the plain read",
    decimals=1,
    axis="read bandwidth, % of that of a plain read of the same bytes in the same run",
    ticks=(0, 25, 50, 75, 100),
    limit=(100, "plain read of the same bytes"),
    lacking="no plain read in its run",
    compare="compare percentages (of the read in the same run), not microseconds",
)
RATE = Measure(
    title="Prompts and chunks: tensor-core rate reached",
    of=attrgetter("tflops"),
    head="TFLOPS",
    unit="",
    words="TFLOPS",
    decimals=0,
    axis="TFLOPS, over the pairs of a query row and a key that it sees",
    ticks=(0, 200, 400, 600),
    limit=None,
    lacking="no time",
    compare="clocks differ from run to run by some percent",
)


def bars(of_case: Mapping[str, Record], measure: Measure = READ) -> list[Bar]:
    """The bars of one case, in the order of PROVIDERS."""
    found = [of_case[provider] for provider in PROVIDERS if provider in of_case]
    return [Bar(record, measure.of(record), record.reason or measure.lacking) for record in found]


def default_cases(newest: Newest, kv_dtype: str = "bf16") -> list[str]:
    """The decode cases of a bf16 q over caches of kv_dtype, without scales, with pages of 16 (else 64), at most MAX_CASES.

    We and most peers have a time for each of these cases; cases with a bar come first.
    """
    dtypes = "bf16" if kv_dtype == "bf16" else f"bf16 q, {kv_dtype} KV"
    for page in PAGES:
        timed: dict[str, list[Record]] = {}
        for name, of_case in newest.items():
            records = [bar.record for bar in bars(of_case) if bar.length is not None and bar.record.case.operation == "decode"]
            if records and records[0].provider == "ours" and (records[0].dtypes, records[0].case.page_size) == (dtypes, page):
                timed[name] = records
        best = sorted(timed, key=lambda name: (-len(timed[name]), timed[name][0].bar is None))[:MAX_CASES]
        if best:
            return in_order(newest, best)
    return []


def long_cases(newest: Newest) -> list[str]:
    """The long queries in bf16 that we and a peer have times for, contiguous and on pages of LONG_PAGES, at most MAX_CASES."""
    found = []
    for name, of_case in newest.items():
        timed = [bar.record for bar in bars(of_case, RATE) if bar.length is not None]
        if len(timed) < 2 or timed[0].provider != "ours":
            continue
        case = timed[0].case
        if case.operation == "attention" and not case.mixed and timed[0].dtypes == "bf16" and case.page_size in LONG_PAGES:
            found.append(name)
    return in_order(newest, found[:MAX_CASES])


def in_order(newest: Newest, names: Iterable[str]) -> list[str]:
    """The cases in the order in which people read them."""
    return sorted(names, key=lambda name: reading_order(next(iter(newest[name].values())).case))


def matching_cases(newest: Newest, patterns: Iterable[str]) -> list[str]:
    """The cases that the globs match, each once, in the order of the globs. Raises ValueError for a glob that matches none."""
    chosen: dict[str, None] = {}
    for pattern in patterns:
        matches = [name for name, of_case in newest.items() if fnmatchcase(name, pattern) and bars(of_case)]
        if not matches:
            raise ValueError(f"cases: {pattern!r} matches no recorded case")
        chosen |= dict.fromkeys(matches)
    return list(chosen)


def draw(cases: Sequence[Sequence[Bar]], measure: Measure = READ) -> str:
    """The picture of several cases as SVG text: one group of bars per case. A provider without any time gets a line instead.

    Raises ValueError when no bar has a length.
    """
    timed = {bar.record.provider for case in cases for bar in case if bar.length is not None}
    groups = [group for case in cases if (group := [bar for bar in case if bar.record.provider in timed])]
    if not groups:
        raise ValueError(f"no case has a {measure.head}: {measure.lacking}")
    records = [bar.record for group in groups for bar in group]
    common = [trait for trait in records[0].traits if all(trait in record.traits for record in records)]
    notes = footer(cases, timed, measure)
    labels = [label(group[0].record, common) for group in groups]
    heights = [max(STEP * len(group), LABEL_STEP * len(lines)) for group, lines in zip(groups, labels, strict=True)]
    bottom = TOP + sum(heights) + GROUP_GAP * (len(groups) - 1)
    height = bottom + FOOTER + NOTE_STEP * len(notes)
    scale = (BARS_RIGHT - BARS_LEFT) / max(measure.ticks[-1], *(bar.length or 0 for group in groups for bar in group))

    svg = ElementTree.Element("svg", xmlns="http://www.w3.org/2000/svg", width=str(WIDTH), height=str(height), role="img")
    svg.set("viewBox", f"0 0 {WIDTH} {height}")
    add(svg, "title", measure.title)
    add(svg, "style", STYLE + "@media (prefers-color-scheme: dark) {" + DARK + "}\n")
    add(svg, "rect", css="card", x=0.5, y=0.5, width=WIDTH - 1, height=height - 1, rx=8)
    add(svg, "text", measure.title, css="head", x=MARGIN, y=42)
    heads = "rows x KV tokens, heads / KV heads / head_dim"
    add(svg, "text", ", ".join([*gpus(records), *common, heads]), css="muted", x=MARGIN, y=63)
    legend(svg, [provider for provider in PROVIDERS if provider in timed], y=92)
    axis(svg, measure, scale, TOP - 8, bottom + 8)
    y = TOP
    for group, lines, group_height in zip(groups, labels, heights, strict=True):
        draw_group(svg, measure, group, lines, scale, y)
        y += group_height + GROUP_GAP
    y = bottom + FOOTER
    for note in notes:
        add(svg, "text", shorten(note, 140, placeholder=" ..."), css="muted small", x=MARGIN, y=y)
        y += NOTE_STEP
    ElementTree.indent(svg)
    return ElementTree.tostring(svg, encoding="unicode") + "\n"


def label(record: Record, common: Sequence[str]) -> list[str]:
    """The lines that name a case: its rows, its heads, and the traits that not all cases share."""
    own = [trait for trait in record.traits if trait not in common]
    return [record.rows, record.heads, *wrap(", ".join(own), LABEL_CHARACTERS)]


def legend(svg: ElementTree.Element, providers: Sequence[str], y: float) -> None:
    """A swatch and a name for each provider, in the order of the bars; 6.8 is a character's usual width at 12 px."""
    x = float(MARGIN)
    for provider in providers:
        name = PROVIDERS[provider][0]
        add(svg, "rect", css=f"bar-{provider}", x=x, y=y - 9, width=10, height=10, rx=2)
        add(svg, "text", name, css="ours" if provider == "ours" else "", x=x + 16, y=y)
        x += 16 + 6.8 * len(name) + 16


def axis(svg: ElementTree.Element, measure: Measure, scale: float, top: float, bottom: float) -> None:
    """Grid, ticks, the line of the limit, and the heads of the two columns of numbers."""
    limit, said = measure.limit or (None, "")
    for tick in measure.ticks:
        x = BARS_LEFT + scale * tick
        add(svg, "line", css="limit" if tick == limit else "grid", x1=x, x2=x, y1=top, y2=bottom)
        add(svg, "text", f"{tick}{measure.unit}", css="muted small", x=x, y=bottom + 16, anchor="middle")
    add(svg, "text", measure.axis, css="muted small", x=(BARS_LEFT + BARS_RIGHT) / 2, y=bottom + 33, anchor="middle")
    if limit is not None:
        add(svg, "text", said, css="small", x=BARS_LEFT + scale * limit, y=top - 8, anchor="end")
    add(svg, "text", measure.head, css="muted small", x=VALUE_RIGHT, y=top - 8, anchor="end")
    add(svg, "text", "us", css="muted small", x=US_RIGHT, y=top - 8, anchor="end")


def draw_group(
    svg: ElementTree.Element, measure: Measure, group: Sequence[Bar], lines: Sequence[str], scale: float, y: float
) -> None:
    """One case: its label (`lines`) at the left, a bar or a reason for each provider, and the numbers at the right."""
    for index, line in enumerate(lines):
        add(svg, "text", line, css="muted" if index else "case", x=MARGIN, y=y + 9 + LABEL_STEP * index)
    for bar in group:
        name = PROVIDERS[bar.record.provider][0]
        css = "number ours" if bar.record.provider == "ours" else "number"
        row = add(svg, "g")
        if bar.length is None:
            text = shorten(f"{name}: {bar.reason}", 90, placeholder=" ...")
            add(row, "title", f"{name}: {bar.reason}")
            add(row, "text", text, css="muted small", x=BARS_LEFT + 6, y=y + 9)
        else:
            add(row, "title", f"{name}: {measure.text(bar.length)} {measure.words}")
            fill = f"bar-{bar.record.provider}"
            add(row, "rect", css=fill, x=BARS_LEFT, y=y, width=scale * bar.length, height=BAR, rx=1.5)
            add(row, "text", measure.text(bar.length), css=css, x=VALUE_RIGHT, y=y + 9, anchor="end")
        if bar.record.us is not None:
            add(row, "text", f"{bar.record.us.median:.1f}", css=css, x=US_RIGHT, y=y + 9, anchor="end")
        y += STEP


def footer(cases: Sequence[Sequence[Bar]], timed: set[str], measure: Measure) -> list[str]:
    """The lines below the picture: providers without any time, providers that round q, versions, and the numbers' origin."""
    every = [bar for case in cases for bar in case]
    absent = {bar.record.provider: bar.reason for bar in reversed(every) if bar.record.provider not in timed}
    shown = [bar.record for bar in every if bar.record.provider in timed]
    rounded = {record.provider: record.fields["q_dtype"] for record in shown if "q_dtype" in record.fields}
    versions = {record.provider: record.version for record in sorted(shown, key=lambda record: record.time)}
    newest = max(shown, key=lambda record: record.time)
    others = len({record.revision for record in shown}) - 1
    commits = f"commit {newest.revision}" + (f" and {others} earlier" if others else "")
    runs = [{bar.record.run for bar in case if bar.record.provider in timed} for case in cases]
    several = [f"Peers may be of earlier commits and runs than ours: {measure.compare}."]
    return [
        *(f"{PROVIDERS[provider][0]}: {absent[provider]}" for provider in PROVIDERS if provider in absent),
        *(f"{PROVIDERS[provider][0]} rounds q to {rounded[provider]}." for provider in PROVIDERS if provider in rounded),
        ", ".join(named(PROVIDERS[p][0].split(",")[0], versions[p]) for p in PROVIDERS if p in versions),
        f"{', '.join(gpus(shown))}, {commits}, {newest.time:%Y-%m-%d}. "
        "Median device time of a whole step, measured as docs/perf.md says.",
        *(several if any(len(found) > 1 for found in runs) else []),
    ]


def named(name: str, version: str) -> str:
    """A provider's name with its version; the version may already begin with the name."""
    return f"{name} {readable(version).removeprefix(name).strip()}"


def readable(version: str) -> str:
    """A version without file names and digests: a library of FlashAttention-3 is named by the project that built it."""
    if version == VLLM_LIBRARY:
        return "as vLLM builds it"
    found = LIBRARY.fullmatch(version)
    if found is None:
        return version
    return f"as built for {found['owner'].replace('vllm', 'vLLM')}" if found["owner"] else f"build {found['digest']}"


def gpus(records: Sequence[Record]) -> list[str]:
    """The devices of the records, each once."""
    return list(dict.fromkeys(record.gpu for record in records))


def add(
    parent: ElementTree.Element, tag: str, text: str = "", css: str = "", anchor: str = "", **numbers: float
) -> ElementTree.Element:
    """Appends an SVG element; characters that XML cannot hold, such as control characters, are dropped from the text."""
    attributes = {name: f"{number:.2f}".rstrip("0").rstrip(".") for name, number in numbers.items()}
    attributes |= {"class": css} if css else {}
    attributes |= {"text-anchor": anchor} if anchor else {}
    element = ElementTree.SubElement(parent, tag, attributes)
    element.text = "".join(c if c.isprintable() or c == "\n" else " " for c in text) or None
    return element


def main(
    results: Annotated[Path, typer.Argument(help="Records of perf.run.", exists=True, dir_okay=False)],
    out: Annotated[Path, typer.Argument(help="The SVG file to write.", dir_okay=False)],
    cases: Annotated[
        str, typer.Option(help="Globs over case names, separated by commas; empty: the most compared ones of --kv-dtype.")
    ] = "",
    kv_dtype: Annotated[str, typer.Option(help="What the caches of the most compared cases store: bf16, e4m3, e5m2.")] = "bf16",
    long: Annotated[bool, typer.Option("--long", help="Prompts and chunks in place of decode.")] = False,
) -> None:
    """Draw the newest records of some cases; with --long, ours of a run that a peer shares, if there is one.

    Unusable lines are reported and left out. Exit code 2 when nothing can be drawn.
    """
    records, problems = read_records([results])
    newest = newest_beside_peers(records) if long else newest_of(records)
    for problem in problems:
        print(problem, file=sys.stderr)
    try:
        check_writable(out, "OUT")
        if kv_dtype not in KV_DTYPES:
            raise ValueError(f"kv_dtype: {kv_dtype!r} is none of {', '.join(KV_DTYPES)}")
        patterns = [pattern.strip() for pattern in cases.split(",") if pattern.strip()]
        usual, measure = (long_cases(newest), RATE) if long else (default_cases(newest, kv_dtype), READ)
        chosen = matching_cases(newest, patterns) if patterns else usual
        picture = draw([bars(newest[name], measure) for name in chosen], measure)
    except InvalidArgument as error:
        print(error, file=sys.stderr)
        raise typer.Exit(2) from error
    except ValueError as error:
        print(f"{results}: {error}", file=sys.stderr)
        raise typer.Exit(2) from error
    out.write_text(picture, encoding="utf-8")
    print(f"{out}: {len(chosen)} cases")


if __name__ == "__main__":
    typer.run(main)
