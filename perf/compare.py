"""Whether a time changed between two revisions: a ratio with its interval, and a verdict that many cases share.

The read kernel is the control of a comparison: the same code on both sides. The median of its ratios is the drift of the
machine from one run to the other and is divided out; their spread around it is the A/A noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import stats

from cute_kernels.tuning import FLOOR, NOISE_FACTOR
from perf.cases import READ
from perf.history import Key, Revision
from perf.records import Record

FALSE_DISCOVERIES = 0.05  # their expected share among the calls
CONFIDENCE = 0.95
RESAMPLES = 2000
MIN_CONTROLS = 5  # cases of the read kernel on both sides; with fewer the noise is taken to be what makes FLOOR the threshold
NORMAL_MAD = 1.4826  # standard deviation over median absolute deviation, of a normal distribution
SPREAD = 2 * stats.norm.ppf(0.8)  # p20 to p80 in standard deviations, of a normal distribution

Verdict = Literal["slower", "faster", "same"]


@dataclass(frozen=True)
class Control:
    """What the read kernel says of two revisions, in logarithms of the ratio new over base.

    drift: the median over the cases; noise: the standard deviation around it, from the median absolute deviation.
    deviations: each case's distance from the drift. With fewer than MIN_CONTROLS cases the drift is 0 and the noise assumed.
    """

    drift: float
    noise: float
    deviations: dict[str, float]

    @property
    def cases(self) -> int:
        return len(self.deviations)

    @property
    def trusted(self) -> bool:
        """Whether there are enough cases to tell."""
        return self.cases >= MIN_CONTROLS

    def noise_of(self, name: str) -> float:
        """The noise of a case: at least what its own control was off by, so that a disturbed case calls nothing."""
        return max(self.noise, abs(self.deviations.get(name, 0.0)) if self.trusted else 0.0)


@dataclass(frozen=True)
class Comparison:
    """A provider's time on one case at two revisions.

    ratio: new over base, the drift divided out, with its 95% interval low..high. p: two-sided, then adjusted for the number of
    cases by `decide`. threshold: the change that is called. sampled: whether both sides hold the time of every replay; else
    the interval rests on percentiles.
    """

    name: str
    provider: str
    base: str
    new: str
    base_us: float
    new_us: float
    ratio: float
    low: float
    high: float
    p: float
    threshold: float
    sampled: bool
    verdict: Verdict = "same"


def control(base: Revision, new: Revision) -> Control:
    """The read kernel's word on two revisions."""
    names = [name for name, provider in base.runs if provider == READ and base.timed((name, READ)) and new.timed((name, READ))]
    logs = np.array([math.log(median_us(new, (name, READ)) / median_us(base, (name, READ))) for name in names])
    drift, noise = 0.0, FLOOR / NOISE_FACTOR
    if len(names) >= MIN_CONTROLS:
        drift = float(np.median(logs))
        noise = NORMAL_MAD * float(np.median(np.abs(logs - drift)))
    return Control(drift, noise, {name: float(log - drift) for name, log in zip(names, logs, strict=True)})


def median_us(revision: Revision, key: Key) -> float:
    """The median microseconds over every replay of a case and provider at a revision."""
    return float(np.median(pooled(revision.timed(key))))


def pooled(records: Sequence[Record]) -> np.ndarray:
    """Microseconds of every replay of some runs."""
    return np.concatenate([samples(record) for record in records])


def samples(record: Record) -> np.ndarray:
    """Microseconds of each replay; where a record holds percentiles only, the quantiles of the log-normal that fits them."""
    assert record.us is not None
    if record.us.samples:
        return np.asarray(record.us.samples)
    deviation = math.log(record.us.p80 / record.us.p20) / SPREAD
    quantiles = (np.arange(record.us.replays) + 0.5) / record.us.replays
    return record.us.median * np.exp(deviation * stats.norm.ppf(quantiles))


def compare(base: Revision, new: Revision, key: Key, controlled: Control) -> Comparison:
    """One case and provider that has a time at both revisions, not yet decided."""
    sides = new.timed(key), base.timed(key)
    new_us, base_us = (pooled(side) for side in sides)
    log = math.log(np.median(new_us) / np.median(base_us))
    found = stats.bootstrap(
        (new_us, base_us), log_ratio, n_resamples=RESAMPLES, confidence_level=CONFIDENCE, method="percentile", rng=0
    )
    noise = controlled.noise_of(key[0])
    reach = float(stats.norm.ppf((1 + CONFIDENCE) / 2)) * noise  # the replays of a run do not show what differs between runs
    low = -math.hypot(log - found.confidence_interval.low, reach)
    high = math.hypot(found.confidence_interval.high - log, reach)
    z = (log - controlled.drift) / max(math.hypot(found.standard_error, noise), 1e-9)
    ratio, low, high = (math.exp(log - controlled.drift + offset) for offset in (0.0, low, high))
    sampled = all(record.us is not None and bool(record.us.samples) for side in sides for record in side)
    p = 2 * float(stats.norm.sf(abs(z)))
    threshold = max(FLOOR, NOISE_FACTOR * noise)
    labels = (*key, base.label, new.label)
    return Comparison(*labels, float(np.median(base_us)), float(np.median(new_us)), ratio, low, high, p, threshold, sampled)


def log_ratio(new: np.ndarray, base: np.ndarray, axis: int = -1) -> np.ndarray:
    """The logarithm of the ratio of the medians, as scipy's bootstrap wants it."""
    return np.log(np.median(new, axis=axis) / np.median(base, axis=axis))


def decide(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """The verdicts: a change is called beyond the threshold, with at most FALSE_DISCOVERIES wrong calls among all expected."""
    if not comparisons:
        return []
    adjusted = stats.false_discovery_control([comparison.p for comparison in comparisons], method="bh")
    return [
        replace(comparison, p=float(p), verdict=verdict(comparison, float(p)))
        for comparison, p in zip(comparisons, adjusted, strict=True)
    ]


def verdict(comparison: Comparison, p: float) -> Verdict:
    """What a comparison with the adjusted p-value `p` says."""
    if p > FALSE_DISCOVERIES:
        return "same"
    if comparison.ratio > 1 + comparison.threshold:
        return "slower"
    return "faster" if comparison.ratio < 1 / (1 + comparison.threshold) else "same"


def compare_revisions(known: Sequence[Revision], new: Revision, providers: Sequence[str]) -> list[Comparison]:
    """Every case that `providers` timed, against the known revision that was fastest at it (the drift divided out), decided."""
    controls = {base.label: control(base, new) for base in known}
    comparisons = []
    for key in new.runs:
        bases = [base for base in known if base.timed(key)]
        if key[1] in providers and new.timed(key) and bases:
            best = min(bases, key=lambda base: median_us(base, key) * math.exp(controls[base.label].drift))
            comparisons.append(compare(best, new, key, controls[best.label]))
    return decide(comparisons)


def changes(history: Sequence[Revision]) -> list[Comparison]:
    """Every time of the history against the revision before it that has one, oldest first, decided together."""
    controls: dict[tuple[str, str], Control] = {}
    before: dict[Key, Revision] = {}
    comparisons = []
    for new in history:
        for key in new.runs:
            if not new.timed(key):
                continue
            if (base := before.get(key)) is not None and key[1] != READ:
                pair = (base.label, new.label)
                if pair not in controls:
                    controls[pair] = control(base, new)
                comparisons.append(compare(base, new, key, controls[pair]))
            before[key] = new
    return decide(comparisons)
