"""Whether a time changed between two revisions: a ratio with its interval, and a verdict that is decided over many cases.

Code that is the same on both sides is the control of a comparison. The median ratio of the read kernel (for an append, of the
copy; for long queries, of the WGMMA loop) is the machine's drift from one run to the other and is divided out; the spread of the
ratios around the median is the A/A noise. Not every kernel follows the drift: one that waits for latency or arithmetic keeps its
time if only the memory is faster. The peers show how far unchanged kernels follow, and a change is called only if no drift of
theirs would explain it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import stats

from cute_kernels.attention.choice.tuning import FLOOR, NOISE_FACTOR
from perf.cases import FLOORS, READ
from perf.history import Key, Revision
from perf.measure import DEVICE, RESULTS
from perf.records import Record

FALSE_DISCOVERIES = 0.05  # the expected share of wrong ones among the called changes
CONFIDENCE = 0.95
RESAMPLES = 2000
MIN_CONTROLS = 5  # cases of the read kernel on both sides; with fewer, the assumed noise makes FLOOR the threshold
FOLLOWERS = (20, 80)  # percentiles of the peers' ratios: an unchanged kernel's drift is assumed to lie between them
NORMAL_MAD = 1.4826  # standard deviation over median absolute deviation, in a normal distribution
SPREAD = 2 * stats.norm.ppf(0.8)  # p20 to p80 in standard deviations, in a normal distribution

OURS = "ours"  # our providers' names begin with it

Verdict = Literal["slower", "faster", "same"]


@dataclass(frozen=True)
class Control:
    """How unchanged code differs between two revisions, in logarithms of the ratio new over base.

    floor: the kernel that does only the work that limits its cases. drift: the median over its cases; noise: the standard
    deviation around the drift, from the median absolute deviation. deviations: each case's distance from the drift. With fewer
    than MIN_CONTROLS cases the drift is 0 and the noise assumed. low, high: the range of an unchanged kernel's own drift, which
    includes the floor's. peers: how many of the peers' times the range rests on; with fewer than MIN_CONTROLS a kernel may follow
    the floor's drift or not at all.
    """

    floor: str
    drift: float
    noise: float
    deviations: dict[str, float]
    low: float
    high: float
    peers: int

    @property
    def cases(self) -> int:
        return len(self.deviations)

    @property
    def trusted(self) -> bool:
        """Whether there are enough cases to tell."""
        return self.cases >= MIN_CONTROLS

    def noise_of(self, name: str) -> float:
        """The noise of a case: at least the deviation of its own control, so that a disturbed case calls no change."""
        return max(self.noise, abs(self.deviations.get(name, 0.0)) if self.trusted else 0.0)

    def changed(self, log: float) -> tuple[float, float]:
        """(a ratio's logarithm less the drift in low..high that explains most of it, the logarithm less the floor's drift)."""
        return log - min(max(log, self.low), self.high), log - self.drift


@dataclass(frozen=True)
class Comparison:
    """A provider's time on one case at two revisions.

    ratio: new over base, the floor's drift divided out, with its 95% interval low..high. least: the ratio that remains whichever
    drift of unchanged kernels is divided out (see Control). p: the two-sided p-value of `least`, later adjusted by `decide` for
    the number of cases. threshold: the change of `least` that is called. sampled: whether both sides hold the time of every
    replay; if not, the interval rests on percentiles.
    """

    name: str
    provider: str
    metric: str
    base: str
    new: str
    base_us: float
    new_us: float
    ratio: float
    low: float
    high: float
    least: float
    p: float
    threshold: float
    sampled: bool
    verdict: Verdict = "same"


def control(base: Revision, new: Revision, metric: str = DEVICE, floor: str = READ) -> Control:
    """The control from the floor of some cases (decode: read; append: copy; long queries: wgmma) and from unchanged peers."""
    logs = {key: log_of(base, new, key) for key in new.runs if key.metric == metric and unchanged(base, new, key, floor)}
    floors = {key.name: log for key, log in logs.items() if key.provider == floor}
    peers = [log for key, log in logs.items() if key.provider not in FLOORS]
    drift, noise = 0.0, FLOOR / NOISE_FACTOR
    if len(floors) >= MIN_CONTROLS:
        drift = float(np.median(list(floors.values())))
        noise = NORMAL_MAD * float(np.median(np.abs(np.array(list(floors.values())) - drift)))
    ends = np.percentile(peers, FOLLOWERS) if len(peers) >= MIN_CONTROLS else [0.0]
    deviations = {name: log - drift for name, log in floors.items()}
    return Control(floor, drift, noise, deviations, float(min(drift, *ends)), float(max(drift, *ends)), len(peers))


def unchanged(base: Revision, new: Revision, key: Key, floor: str) -> bool:
    """Whether both sides time the same code, not this package's and of one version, on a case whose floor is `floor`."""
    sides = base.timed(key), new.timed(key)
    if not all(sides) or key.provider.startswith(OURS) or sides[1][0].case.floor != floor:
        return False
    return len({record.version for side in sides for record in side}) == 1


def log_of(base: Revision, new: Revision, key: Key) -> float:
    """The logarithm of the ratio of the medians, new over base."""
    return math.log(median_us(new, key) / median_us(base, key))


def median_us(revision: Revision, key: Key) -> float:
    """The median microseconds over all replays of a case, provider and metric at a revision."""
    return float(np.median(pooled(revision.timed(key))))


def pooled(records: Sequence[Record]) -> np.ndarray:
    """Microseconds of each replay of some runs."""
    return np.concatenate([samples(record) for record in records])


def samples(record: Record) -> np.ndarray:
    """Microseconds of each replay; if a record holds only percentiles, the quantiles of the log-normal that fits them."""
    assert record.us is not None
    if record.us.samples:
        return np.asarray(record.us.samples)
    deviation = math.log(record.us.p80 / record.us.p20) / SPREAD
    quantiles = (np.arange(record.us.replays) + 0.5) / record.us.replays
    return record.us.median * np.exp(deviation * stats.norm.ppf(quantiles))


def compare(base: Revision, new: Revision, key: Key, controlled: Control) -> Comparison:
    """Compares a case and provider that has a time at both revisions; the verdict is not yet decided."""
    sides = new.timed(key), base.timed(key)
    new_us, base_us = (pooled(side) for side in sides)
    log = math.log(np.median(new_us) / np.median(base_us))
    found = stats.bootstrap(
        (new_us, base_us), log_ratio, n_resamples=RESAMPLES, confidence_level=CONFIDENCE, method="percentile", rng=0
    )
    noise = controlled.noise_of(key.name)
    reach = float(stats.norm.ppf((1 + CONFIDENCE) / 2)) * noise  # the replays of a run do not show what differs between runs
    below, above = (math.hypot(log - end, reach) for end in found.confidence_interval)
    least, ratio = controlled.changed(log)
    z = least / max(math.hypot(found.standard_error, noise), 1e-9)
    return Comparison(
        *key,
        base=base.label,
        new=new.label,
        base_us=float(np.median(base_us)),
        new_us=float(np.median(new_us)),
        ratio=math.exp(ratio),
        low=math.exp(log - controlled.high - below),
        high=math.exp(log - controlled.low + above),
        least=math.exp(least),
        p=2 * float(stats.norm.sf(abs(z))),
        threshold=max(FLOOR, NOISE_FACTOR * noise),
        sampled=all(record.us is not None and bool(record.us.samples) for side in sides for record in side),
    )


def log_ratio(new: np.ndarray, base: np.ndarray, axis: int = -1) -> np.ndarray:
    """The logarithm of the ratio of the medians, in the form that scipy's bootstrap calls."""
    return np.log(np.median(new, axis=axis) / np.median(base, axis=axis))


def decide(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The verdicts: a change is called beyond the threshold; the expected share of wrong calls is at most FALSE_DISCOVERIES."""
    if not comparisons:
        return []
    adjusted = stats.false_discovery_control([comparison.p for comparison in comparisons], method="bh")
    return [
        replace(comparison, p=float(p), verdict=verdict(comparison, float(p)))
        for comparison, p in zip(comparisons, adjusted, strict=True)
    ]


def verdict(comparison: Comparison, p: float) -> Verdict:
    """The verdict on a comparison with the adjusted p-value `p`."""
    if p > FALSE_DISCOVERIES:
        return "same"
    if comparison.least > 1 + comparison.threshold:
        return "slower"
    return "faster" if comparison.least < 1 / (1 + comparison.threshold) else "same"


class Controls:
    """The controls of pairs of revisions, each made once."""

    def __init__(self) -> None:
        self.made: dict[tuple[str, ...], Control] = {}

    def of(self, base: Revision, new: Revision, key: Key) -> Control:
        """The control of a time at two revisions: for its metric and its case's floor."""
        floor = new.timed(key)[0].case.floor
        pair = (base.label, new.label, key.metric, floor)
        if pair not in self.made:
            self.made[pair] = control(base, new, key.metric, floor)
        return self.made[pair]


def compare_revisions(
    known: Sequence[Revision], new: Revision, providers: Sequence[str], metrics: Sequence[str] = RESULTS
) -> list[Comparison]:
    """Every time of `providers` against the known revision next to which it is slowest (Control.changed), decided."""
    controls, comparisons = Controls(), []
    for key in new.runs:
        bases = [base for base in known if base.timed(key)]
        if key.provider in providers and key.metric in metrics and new.timed(key) and bases:
            rated = [(controls.of(base, new, key).changed(log_of(base, new, key)), base) for base in bases]
            _, best = max(rated, key=lambda entry: entry[0])
            comparisons.append(compare(best, new, key, controls.of(best, new, key)))
    return decide(comparisons)


def changes(history: Sequence[Revision]) -> list[Comparison]:
    """Every time of the history against the last earlier revision that has one, oldest first, decided together."""
    controls, comparisons = Controls(), []
    before: dict[Key, Revision] = {}
    for new in history:
        for key in new.runs:
            if not new.timed(key) or key.metric not in RESULTS:
                continue
            if (base := before.get(key)) is not None and key.provider not in FLOORS:
                comparisons.append(compare(base, new, key, controls.of(base, new, key)))
            before[key] = new
    return decide(comparisons)
