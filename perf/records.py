"""Reading perf/results/*.jsonl: every line becomes a record that counts, or a problem that names file and line."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from datetime import datetime
from pathlib import Path
from textwrap import shorten
from typing import Any, Literal, TypeVar

from cute_kernels.planning.variants import PRETEND, DeviceFacts
from perf.cases import FLOORS, PLAIN, READ, Bar, Case, Mixed, Rows, Spread, short
from perf.correctness import GateResult, Tolerance
from perf.measure import RESULTS
from perf.record import SCHEMA, ratio_field
from perf.timing import Timing

T = TypeVar("T")
PAGED_ONLY = "its cache is paged"  # a provider's reason to refuse a contiguous case, which its library may well serve

ProblemKind = Literal["truncated", "foreign", "malformed", "no gate", "unknown GPU", "duplicate"]


@dataclass(frozen=True)
class Problem:
    """A line that is not used, and why. If a line is repeated, the later one is used."""

    path: Path
    line: int
    kind: ProblemKind
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.kind}: {self.text}"


class BadLine(ValueError):
    """The error for a line that is no record; its text says what is wrong."""

    def __init__(self, kind: ProblemKind, text: str) -> None:
        self.kind, self.text = kind, text
        super().__init__(kind, text)


@dataclass(frozen=True)
class Record:
    """The result of one provider on one case. us: microseconds per call; without them `reason` says why.

    ratio: the median over that of the case's floor in the same run, if the record has it. kv_dtype: of the cache; k_scale,
    v_scale: "none", or the granularity of the scales. bar_met: None if the case has no bar, or no time to compare with it.
    fields: the line as it was read.
    """

    path: Path
    line: int
    case: Case
    name: str
    kv_dtype: str
    k_scale: str
    v_scale: str
    provider: str
    version: str
    metric: str
    us: Timing | None
    ratio: float | None
    gate: GateResult | None
    reason: str
    bar: Bar | None
    bar_met: bool | None
    gpu: str
    commit: str
    dirty: bool
    time: datetime
    fields: Mapping[str, Any] = field(repr=False, compare=False)

    @property
    def revision(self) -> str:
        """The commit as a label: shortened, and whether the checkout had changes."""
        return self.commit[:9] + ("-dirty" if self.dirty else "")

    @property
    def run(self) -> tuple[object, ...]:
        """The values that records share if they were timed interleaved: device, state of the checkout, case and time."""
        return (self.gpu, self.machine, self.revision, self.name, self.time)

    @property
    def tflops(self) -> float | None:
        """The rate of a long query; None if the record computes something else, has no time, or is limited by the memory."""
        computes = self.us is not None and self.provider not in (PLAIN, READ)
        return self.case.tflops(self.us.median) if self.us and computes and self.case.long else None

    @property
    def machine(self) -> str | None:
        """The physical GPU that the record is from, as a hash of its UUID; None if the record does not say."""
        found = self.fields.get("machine")
        return found.get("id") if isinstance(found, Mapping) else None

    @property
    def rows(self) -> str:
        """The rows of the case as people write them: "64 x 8k"."""
        lengths = self.case.lengths
        if self.case.operation == "append":
            return f"append {short(self.case.batch_size)}"
        what = f"{self.case.operation} " if self.case.operation in ("weights", "backward") else ""
        if isinstance(lengths, Mixed):
            return " + ".join(f"{count} x {short(tokens)} q{q_rows}" for count, tokens, q_rows in lengths.groups)
        if isinstance(lengths, Rows):
            return what + " + ".join(f"{count} x {short(tokens)}" for count, tokens in lengths.groups)
        return f"{what}{lengths.batch} x {short(lengths.low)}-{short(lengths.high)}"

    @property
    def heads(self) -> str:
        """Query heads, KV heads and head_dim: "32/8/128"."""
        return f"{self.case.num_heads}/{self.case.num_kv_heads}/{self.case.head_dim}"

    @property
    def dtypes(self) -> str:
        """The dtype of q, or of the appended values, the cache's if it differs, and the granularity of the scales."""
        incoming = self.case.dtype if self.case.operation == "append" else f"{self.case.dtype} q"
        dtype = self.case.dtype if self.kv_dtype == self.case.dtype else f"{incoming}, {self.kv_dtype} KV"
        return dtype if self.case.kv_scale is None else f"{dtype}, {self.case.kv_scale} scales"

    @property
    def pages(self) -> str:
        return f"pages of {self.case.page_size}" if self.case.page_size else "contiguous"

    @property
    def options(self) -> tuple[str, ...]:
        """The options that set a case apart in addition to its rows, heads, dtypes and pages."""
        case = self.case
        tables = tuple(option.upper() for option in (case.layout, case.table_format) if option in ("NHD", "csr"))
        return (*tables, *((case.lengths.kind,) if isinstance(case.lengths, Spread) else ()), *case.score_labels)

    @property
    def traits(self) -> tuple[str, ...]:
        """The traits that set a case apart in addition to its rows and heads."""
        return (self.dtypes, self.pages, *self.options)


def read_records(paths: Iterable[Path]) -> tuple[list[Record], list[Problem]]:
    """Every usable record in the order of the files and their lines, and a problem for each line that is not used.

    A run's line repeated (same GPU, commit, case, provider, metric and time) counts once: the later one.
    """
    records: dict[tuple[object, ...], Record] = {}
    problems = []
    for path in paths:
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                record = parse(line, path, number)
            except BadLine as bad:
                problems.append(Problem(path, number, bad.kind, shorten(bad.text, 200)))
                continue
            key = (record.gpu, record.revision, record.name, record.provider, record.metric, record.time)
            first = records.pop(key, None)
            if first is not None:
                problems.append(Problem(first.path, first.line, "duplicate", f"the same run again in {path}:{number}"))
            records[key] = record
    return list(records.values()), problems


def parse(line: bytes, path: Path = Path(), number: int = 0) -> Record:
    """The record that one line holds. Raises BadLine."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BadLine("truncated", f"not one JSON value: {type(error).__name__}: {error}") from error
    if not isinstance(entry, dict) or entry.get("schema") != SCHEMA:
        found = f"schema {entry.get('schema')!r}" if isinstance(entry, dict) else type(entry).__name__
        raise BadLine("foreign", f"not an object of schema {SCHEMA}: {found}")
    try:
        record = parse_fields(entry, path, number)
    except (ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        raise BadLine("malformed", f"{type(error).__name__}: {error}") from error
    check_gpu(record)
    check_gate(record)
    return record


def parse_fields(entry: Mapping[str, Any], path: Path, number: int) -> Record:
    """The record of a line's object. Raises what a missing or ill-typed field raises."""
    time = datetime.fromisoformat(get(entry, "timestamp", str))
    if time.tzinfo is None:
        raise ValueError(f"timestamp {entry['timestamp']!r} has no time zone")
    case = parse_case(entry)
    us, gate, bar, why = (entry.get("us"), entry.get("gate"), entry.get("bar"), reason(entry))
    ratio_name = ratio_field(case)
    ratio = entry.get(ratio_name)
    if us is None and not why:
        raise ValueError("neither a time nor a reason for its absence")
    return Record(
        path=path,
        line=number,
        case=case,
        name=get(entry, "name", str),
        kv_dtype=case.kv_dtype or case.dtype,
        k_scale=case.kv_scale or "none",
        v_scale=case.kv_scale or "none",
        provider=get(entry, "provider", str),
        version=get(entry, "version", str),
        metric=get(entry, "metric", str),
        us=None if us is None else parse_timing(us),
        ratio=None if ratio is None else positive(ratio_name, ratio),
        gate=None if gate is None else parse_gate(gate),
        reason=why,
        bar=None if bar is None else Bar(**{name: value for name, value in bar.items() if name != "met"}),
        bar_met=None if bar is None else bar.get("met"),
        gpu=str(entry.get("gpu") or ""),
        commit=str(entry.get("commit") or "unknown"),
        dirty=bool(entry.get("dirty")),
        time=time,
        fields=entry,
    )


def parse_case(entry: Mapping[str, Any]) -> Case:
    """The case of a record: the inverse of record.case_fields. A field that older records lack takes its default."""
    rule = dict(get(entry, "lengths", dict))
    kinds: dict[str, type[Rows | Spread | Mixed]] = {"Rows": Rows, "Spread": Spread, "Mixed": Mixed}
    kind = kinds[rule.pop("rule")]
    if "groups" in rule:
        rule["groups"] = tuple(tuple(map(int, group)) for group in rule["groups"])
    own = {field.name: entry[field.name] for field in fields(Case) if field.default is MISSING or field.name in entry}
    return Case(**own | {"lengths": kind(**rule)})


def parse_timing(us: Mapping[str, Any]) -> Timing:
    """A record's times. `samples` is empty in records that are older than this field."""
    times = {name: positive(f"us.{name}", us[name]) for name in ("median", "p20", "p80")}
    samples = tuple(positive("us.samples", sample) for sample in us.get("samples") or ())
    return Timing(**times, replays=int(us["replays"]), samples=samples)


def parse_gate(gate: Mapping[str, Any]) -> GateResult:
    """A record's gate. Raises ValueError if it does not say whether it was passed."""
    names = ("error", "torch_error", "lse_error", "relative_error", "used")
    errors = {name: None if gate.get(name) is None else float(gate[name]) for name in names}
    tolerance = None if gate.get("tolerance") is None else parse_tolerance(gate["tolerance"])
    return GateResult(**errors, tolerance=tolerance, passed=get(gate, "passed", bool), reason=str(gate.get("reason") or ""))


def parse_tolerance(asked: Mapping[str, float]) -> Tolerance:
    """A record's tolerance. Older ones (`factor`, `ulps`) bound the elements of a row only, by the largest over its heads."""
    if "factor" not in asked:
        return Tolerance(**asked)
    return Tolerance(math.inf, 0, asked["factor"], asked["ulps"], asked["relative"])


def check_gpu(record: Record) -> None:
    """Raises BadLine for a GPU name without a model, or for a GPU that is not its file's."""
    slug = DeviceFacts("cuda", record.gpu, None, 1).slug
    if slug == "cuda":
        raise BadLine("unknown GPU", f"gpu {record.gpu!r} names no model")
    if record.path.stem in PRETEND and slug != record.path.stem:
        raise BadLine("unknown GPU", f"gpu {record.gpu!r} does not belong in {record.path.name}")


def check_gate(record: Record) -> None:
    """Raises BadLine for a time whose result passed no gate.

    Host times, the floors, and steps other than the call ("device.plan") have no result.
    """
    if record.us is None or record.metric not in RESULTS or record.provider in FLOORS:
        return
    if record.gate is None or not record.gate.passed:
        raise BadLine("no gate", f"a time of {record.provider} whose result was not found right")


def get(entry: Mapping[str, Any], name: str, kind: type[T]) -> T:
    """A field of an object. Raises ValueError if it is absent or of another type."""
    value = entry.get(name)
    if not isinstance(value, kind):
        raise ValueError(f"{name} is {value!r}, not {kind.__name__}")
    return value


def positive(name: str, value: float) -> float:
    """`value`, finite and above 0. Raises ValueError."""
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value!r}, not a positive number")
    return float(value)


def reason(entry: Mapping[str, Any]) -> str:
    """Why a record has no time, in words; empty if it does not say."""
    if entry.get("not_supported") == PAGED_ONLY:
        return "not measured here: this provider runs it over pages only"
    texts = {"not supported": entry.get("not_supported"), "failed": entry.get("error")}
    texts["wrong result"] = (entry.get("gate") or {}).get("reason")
    return next((f"{what}: {text}" for what, text in texts.items() if text), "")
