"""What the page shows, as data: the newest result of every case, its history, and what changed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from perf.case_sets import case_sets
from perf.cases import COPY, FLOORS, PARTS, PLAIN, READ, WGMMA, WIDE
from perf.compare import Comparison, changes, compare_revisions
from perf.history import Key, Revision, by_gpu, revisions
from perf.measure import BEHIND_WEIGHTS, DEVICE, IN_STREAM
from perf.ordering import reading_order
from perf.picture import PROVIDERS as PICTURED
from perf.picture import newest_of
from perf.records import Problem, Record

OURS = "ours"
NOT_MEASURED = "not measured"
# provider -> label, colours in the light and the dark: those of the pictures, and further peers of long queries
PROVIDERS = PICTURED | {
    "flashinfer-fa3": ("FlashInfer fa3", "#7d7aa8", "#a5a1d6"),
    "cudnn": ("cuDNN", "#9a8c5e", "#c4b680"),
    "fa2": ("FlashAttention-2", "#6b7a99", "#9fb0d0"),
}
FLOOR_LABELS = {READ: "plain read", COPY: "plain copy", WGMMA: "WGMMA loop"}
OWN = {  # ours too, and no peers
    "ours-sm80": "our SM80 variant",
    PLAIN: "our plain decode",
    WIDE: "ours over 16 bits",
    PARTS: "our plans in turn",
}
DETAILS = ("sku", "q_dtype", "shape", "num_ctas", "turns", "num_splits", "workspace_bytes", "prepare_s")


@dataclass(frozen=True)
class Result:
    """One record. Times in microseconds; `reason` where there is none. ratio: to the case's floor, in its run. error: max abs
    against f64; error_ratio: over that of same-dtype PyTorch; relative_error: 2-norms, absent in older records. sampled: whether
    an older gate found that, on some rows, each over all its heads. faster: its time over ours in the same run, None where that
    run has none of ours. tflops: the rate of a long query, which the tensor core limits, else None. in_stream, in_stream_faster:
    the same of the time behind a kernel that writes q; behind_weights, behind_weights_faster: behind one that reads weights.
    source: file and line."""

    provider: str
    version: str
    revision: str
    time: str
    us: float | None
    p20: float | None
    p80: float | None
    samples: tuple[float, ...]
    ratio: float | None
    error: float | None
    error_ratio: float | None
    relative_error: float | None
    sampled: bool
    faster: float | None
    tflops: float | None
    in_stream: float | None
    in_stream_faster: float | None
    behind_weights: float | None
    behind_weights_faster: float | None
    reason: str
    details: str
    source: str


@dataclass(frozen=True)
class CaseView:
    """One case. results: the newest of each provider; history: all of them, oldest first; host: the newest times of steps, by
    provider and step. bar: what it has to reach; bar_met: None where that is unknown. floor: the provider whose time is the
    limit; long: whether that is the tensor core's, so that rates are shown."""

    name: str
    operation: str
    heads: str
    rows: str
    options: str
    dtypes: str
    pages: str
    ragged: bool
    megabytes: float
    floor: str
    long: bool
    bar: str
    bar_met: bool | None
    results: Mapping[str, Result]
    history: Mapping[str, tuple[Result, ...]]
    host: Mapping[str, float]
    changes: tuple[Comparison, ...]

    @property
    def ours(self) -> Result | None:
        return self.results.get(OURS)

    @property
    def has_peers(self) -> bool:
        """Whether anyone but us and the floor has a result."""
        return any(provider not in (OURS, *OWN, *FLOORS) for provider in self.results)


@dataclass(frozen=True)
class HeatMap:
    """Cases by shape (rows: rows, heads, options) and by dtypes and pages (columns). A cell without a case was not measured."""

    columns: tuple[tuple[str, str], ...]
    rows: tuple[tuple[tuple[str, str, str], tuple[CaseView | None, ...]], ...]


@dataclass(frozen=True)
class GpuView:
    """Everything about one GPU. against_best: the newest revision's times of ours against the best known before it.

    slug: the name as the page's address spells it. revisions: label and time, oldest first. providers: label and version of
    those that have results, ours first.
    """

    slug: str
    name: str
    newest: Record = field(repr=False)
    revisions: tuple[tuple[str, str], ...]
    cases: Mapping[str, CaseView]
    heat_map: HeatMap
    against_best: tuple[Comparison, ...]
    changes: tuple[Comparison, ...]
    providers: Mapping[str, tuple[str, str]]

    @property
    def barred(self) -> list[CaseView]:
        return [case for case in self.cases.values() if case.bar]

    @property
    def missed(self) -> list[CaseView]:
        """The cases whose bar is missed."""
        return [case for case in self.barred if case.bar_met is False]

    @property
    def measured(self) -> list[CaseView]:
        """The cases that we have a time of."""
        return [case for case in self.cases.values() if case.ours and case.ours.us]

    @property
    def best(self) -> CaseView | None:
        """The case of decode in which we are nearest to the plain read; what an append writes may stay in L2."""
        decode = (case for case in self.measured if case.operation == "decode" and ratio_of(case))
        return min(decode, key=ratio_of, default=None)

    @property
    def missing(self) -> list[str]:
        """The named cases that have no time of ours."""
        measured = {case.name for case in self.measured}
        names = {case.name: None for cases in case_sets().values() for case in cases}
        return [name for name in names if name not in measured]


def ratio_of(case: CaseView) -> float:
    """Our time over the plain read's; 0 where it is not known, or no limit."""
    return (case.ours.ratio if case.ours and case.ours.tflops is None else None) or 0.0


@dataclass(frozen=True)
class Page:
    """The whole page: one view a GPU, and the lines that were not used."""

    gpus: tuple[GpuView, ...]
    problems: tuple[Problem, ...]


def page_of(records: Sequence[Record], problems: Iterable[Problem]) -> Page:
    """The page of some records. Raises ValueError where there is none with a device time."""
    gpus = [gpu_view(name, of_gpu) for name, of_gpu in by_gpu(records).items() if any(r.metric == DEVICE for r in of_gpu)]
    if not gpus:
        raise ValueError("results: hold no record of device time")
    gpus.sort(key=lambda gpu: len(gpu.cases), reverse=True)  # the page opens with the GPU that most is known of
    return Page(tuple(gpus), tuple(problems))


def gpu_view(name: str, records: Sequence[Record]) -> GpuView:
    """The view of one GPU's records."""
    history = revisions(records)
    called = [comparison for comparison in changes(history) if comparison.verdict != "same"]
    newest = newest_of(records)
    hosts, runs = step_times(records), Runs(records)
    ordered = sorted(newest.items(), key=lambda item: reading_order(next(iter(item[1].values())).case))
    cases = {
        case: case_view(of_case, history, runs, hosts.get(case, {}), [change for change in called if change.name == case])
        for case, of_case in ordered
    }
    versions = {record.provider: record.version for record in sorted(records, key=lambda record: record.time)}
    order = [*PROVIDERS, *(provider for provider in versions if provider not in PROVIDERS and provider not in FLOORS)]
    return GpuView(
        slug=re.sub(r"[^a-z0-9]+", "-", name.lower()),
        name=name,
        newest=max(records, key=lambda record: record.time),
        revisions=tuple((revision.label, f"{revision.time:%Y-%m-%d %H:%M}") for revision in history),
        cases=cases,
        heat_map=heat_map(list(cases.values())),
        against_best=tuple(compare_revisions(history[:-1], history[-1], [OURS])) if len(history) > 1 else (),
        changes=tuple(called),
        providers={provider: (label_of(provider), versions[provider]) for provider in order if provider in versions},
    )


def label_of(provider: str) -> str:
    """A provider's name as people write it."""
    if provider in OWN:
        return OWN[provider]
    return PROVIDERS[provider][0].split(",")[0] if provider in PROVIDERS else provider


def case_view(
    newest: Mapping[str, Record],
    history: Sequence[Revision],
    runs: Runs,
    host: Mapping[str, float],
    called: Sequence[Comparison],
) -> CaseView:
    """The view of one case from its newest records by provider."""
    any_record = next(iter(newest.values()))
    ours = newest.get(OURS)
    past = {
        provider: tuple(
            result(record, runs) for entry in history for record in entry.runs.get(Key(any_record.name, provider), ())
        )
        for provider in newest
    }
    return CaseView(
        name=any_record.name,
        operation=any_record.case.operation,
        heads=any_record.heads,
        rows=any_record.rows,
        options=", ".join(any_record.options),
        dtypes=any_record.dtypes,
        pages=any_record.pages,
        ragged=len(set(any_record.case.tokens())) > 1,
        megabytes=megabytes(newest.values()),
        floor=any_record.case.floor,
        long=any_record.case.long,
        bar=str(ours.bar) if ours and ours.bar else "",
        bar_met=ours.bar_met if ours else None,
        results={provider: result(record, runs) for provider, record in newest.items()},
        history=past,
        host=host,
        changes=tuple(called),
    )


def megabytes(records: Iterable[Record]) -> float:
    """MB of K and V that a case reads, as its records say."""
    return max(float(record.fields.get("bytes") or 0) for record in records) / 1e6


class Runs:
    """The times of each run, by provider and metric: only what was timed interleaved is held against each other."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.us = {(record.run, record.provider, record.metric): record.us.median for record in records if record.us}

    def us_of(self, record: Record, metric: str) -> float | None:
        """The median of a metric of a record's provider in its run."""
        return self.us.get((record.run, record.provider, metric))

    def over_ours(self, record: Record, metric: str) -> float | None:
        """That over ours in the same run; None where the run does not hold both."""
        theirs, ours = self.us_of(record, metric), self.us.get((record.run, OURS, metric))
        return None if theirs is None or ours is None else theirs / ours


def result(record: Record, runs: Runs) -> Result:
    """A record for the page, beside what else its run holds."""
    us, gate = record.us, record.gate
    return Result(
        provider=record.provider,
        version=record.version,
        revision=record.revision,
        time=f"{record.time:%Y-%m-%d %H:%M}",
        us=us.median if us else None,
        p20=us.p20 if us else None,
        p80=us.p80 if us else None,
        samples=us.samples if us else (),
        ratio=record.ratio,
        error=gate.error if gate else None,
        error_ratio=gate.error / gate.torch_error if gate and gate.error is not None and gate.torch_error else None,
        relative_error=gate.relative_error if gate else None,
        sampled=gate is not None and gate.used is None,
        faster=runs.over_ours(record, DEVICE),
        tflops=record.tflops,
        in_stream=runs.us_of(record, IN_STREAM),
        in_stream_faster=runs.over_ours(record, IN_STREAM),
        behind_weights=runs.us_of(record, BEHIND_WEIGHTS),
        behind_weights_faster=runs.over_ours(record, BEHIND_WEIGHTS),
        reason=record.reason,
        details=details(record),
        source=f"{record.path.name}:{record.line}",
    )


def details(record: Record) -> str:
    """What a record says of how it ran, in words."""
    found: dict[str, object] = {name: record.fields[name] for name in DETAILS if name in record.fields}
    sku = found.pop("sku", None)
    if isinstance(sku, dict):
        found = {"variant": sku.get("variant"), **(sku.get("config") or {}), **found}
    return ", ".join(f"{name}={value}" for name, value in found.items())


def step_times(records: Iterable[Record]) -> dict[str, dict[str, float]]:
    """The newest time of each case's steps, by provider and step: host times, and what runs on the device beside the call."""
    times: dict[str, dict[str, float]] = {}
    for record in sorted(records, key=lambda record: record.time):
        where, _, step = record.metric.partition(".")
        if step and record.us is not None:
            name = f"{label_of(record.provider)} {step}" + ("" if where == "host" else f", {where}")
            times.setdefault(record.name, {})[name] = record.us.median
    return times


def heat_map(cases: Sequence[CaseView]) -> HeatMap:
    """The cases by shape, and by dtypes and pages."""

    def page(case: CaseView) -> int:
        return int(case.pages.split()[-1]) if case.pages.startswith("pages") else 0

    dtypes = list(dict.fromkeys(case.dtypes for case in cases))
    columns = dict.fromkeys(
        (case.dtypes, case.pages) for case in sorted(cases, key=lambda case: (dtypes.index(case.dtypes), page(case) or 1 << 30))
    )
    found: dict[tuple[str, str, str], dict[tuple[str, str], CaseView]] = {}
    for case in cases:
        found.setdefault((case.rows, case.heads, case.options), {})[case.dtypes, case.pages] = case
    return HeatMap(tuple(columns), tuple((shape, tuple(of.get(column) for column in columns)) for shape, of in found.items()))
