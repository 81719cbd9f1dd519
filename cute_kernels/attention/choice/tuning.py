"""The decisions of the tuner, without a clock: what is tried, what is given up, what is written. perf.tune does the timing.

A configuration is worth an entry of plans/<gpu>.json if it beats the heuristic's choice on a measured problem by more
than the noise. The entry then serves the problems around that one: up to halfway, by ratio, to the next measured problems.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

from ...config.decode import SMEM_BYTES, TWO_CTAS_HEAD_DIM, DecodeConfig, KernelSpec
from ...config.limits import supports
from ...config.tiling import Arch, Target
from ..descriptors import DecodeProblem
from ..kernel_spec import kernel_spec
from .cost_model import predict_us
from .heuristics import pairs_heads
from .tuned import Bucket, Entry, Measured, exact_of

TILES = (16, 32, 64, 128)
WARPS = (2, 4, 8)
RING_BYTES = (65_536, 98_304, 131_072, 196_608)  # on an SM, over all its CTAs
TWO_CTAS_WARPS = 4  # with more, an SM's registers do not hold two CTAs
HOPELESS_MODEL = 1.25  # times the cheapest prediction: not compiled. Predictions were within 1.07 where they were compared
HOPELESS_TRIAL = 1.05  # times the fastest of a short trial: not timed in full
HOPELESS_GROUP = 1.10  # times the winner on every problem of a group so far: not tried again
GROUP_PROBLEMS = 3  # problems of a group that are tried before a configuration is given up for the whole group
FINALISTS = 6
FLOOR = 0.02  # a smaller change is noise, here and for perf.compare
NOISE_FACTOR = 3.0  # a change within this many times the difference of two measurements of the same thing is noise, too
EDGE = math.sqrt(2)  # how far an entry reaches beyond the first and last measured extent, as a ratio


def sweep(problem: DecodeProblem, arch: Arch, target: Target, sm_count: int) -> list[DecodeConfig]:
    """Every configuration that `supports` allows and the cost model does not call hopeless, the cheapest prediction first."""
    specs: dict[DecodeConfig, KernelSpec] = {}
    heads = (1, 2) if pairs_heads(problem, arch) else (1,)
    for tile_n, num_warps, ctas_per_sm, ring_bytes, unit_heads in product(TILES, WARPS, (1, 2), RING_BYTES, heads):
        shallow = DecodeConfig(tile_n, num_warps, num_warps, ctas_per_sm, unit_heads)
        one = kernel_spec(problem, arch, target, shallow, partition="balanced")
        num_stages = ring_bytes // ctas_per_sm // one.tile_bytes // num_warps * num_warps
        if num_stages:
            config = replace(shallow, num_stages=num_stages)
            specs[config] = kernel_spec(problem, arch, target, config, partition="balanced")
    fitting = [config for config, spec in specs.items() if resident(spec, config) and not supports(spec)]
    predicted = {config: predict_us(problem, config, arch, target, sm_count).total_us for config in fitting}
    limit = HOPELESS_MODEL * min(predicted.values(), default=0.0)
    return sorted((config for config in fitting if predicted[config] <= limit), key=predicted.__getitem__)


def resident(spec: KernelSpec, config: DecodeConfig) -> bool:
    """Whether an SM holds as many CTAs as the grid counts on."""
    if config.ctas_per_sm == 1:
        return True
    fits = config.ctas_per_sm * spec.smem_bytes <= SMEM_BYTES[spec.target]
    return fits and config.num_warps <= TWO_CTAS_WARPS and spec.head_dim <= TWO_CTAS_HEAD_DIM


def finalists(trial_us: Mapping[DecodeConfig, float]) -> list[DecodeConfig]:
    """The configurations of a short trial to time in full: close to the fastest, at most FINALISTS, the fastest first."""
    limit = HOPELESS_TRIAL * min(trial_us.values(), default=0.0)
    ranked = sorted(trial_us, key=trial_us.__getitem__)
    return [config for config in ranked if trial_us[config] <= limit][:FINALISTS]


@dataclass
class Group:
    """What the problems of one kernel shape have shown: their configurations compile once, and mostly lose together."""

    problems: int = 0
    closest: dict[DecodeConfig, float] = field(default_factory=dict)  # the smallest ratio to a winner

    def worth_trying(self, configs: Iterable[DecodeConfig]) -> list[DecodeConfig]:
        """The configurations that were close to the winner on at least one problem so far, or were not tried."""
        if self.problems < GROUP_PROBLEMS:
            return list(configs)
        return [config for config in configs if self.closest.get(config, 1.0) <= HOPELESS_GROUP]

    def learn(self, trial_us: Mapping[DecodeConfig, float]) -> None:
        """Takes in the trial of one more problem."""
        best = min(trial_us.values())
        self.problems += 1
        for config, us in trial_us.items():
            self.closest[config] = min(self.closest.get(config, math.inf), us / best)


@dataclass(frozen=True)
class Finding:
    """What was measured on one problem: the fastest configuration, the heuristic's, and the noise.

    us, heuristic_us: microseconds per call, timed side by side. noise: the relative difference of two timings of the
    heuristic's configuration in the same round.
    """

    problem: DecodeProblem
    arch: Arch
    config: DecodeConfig
    us: float
    heuristic_us: float
    noise: float

    @property
    def gain(self) -> float:
        """The part of the heuristic's time that is saved."""
        return 1 - self.us / self.heuristic_us

    @property
    def threshold(self) -> float:
        """The gain that the noise may feign."""
        return max(FLOOR, NOISE_FACTOR * self.noise)

    @property
    def wins(self) -> bool:
        """Whether the configuration is worth an entry."""
        return self.gain > self.threshold


Cell = tuple[Bucket, Bucket, Bucket]  # in the order of tuned.BUCKETS


def cells(points: Sequence[tuple[DecodeProblem, Arch]]) -> list[Cell]:
    """The buckets of each tuned problem: its own num_kv_heads, and extents up to halfway to those of its neighbours.

    Neighbours are problems of the same kernel: batches are compared among all of them, lengths among those of the same batch.
    """
    batches: dict[object, set[int]] = {}
    lengths: dict[object, set[int]] = {}
    for problem, arch in points:
        batches.setdefault(group_of(problem, arch), set()).add(problem.batch_size)
        lengths.setdefault((group_of(problem, arch), problem.batch_size), set()).add(problem.max_seq_len or 0)
    return [
        (
            Bucket(problem.num_kv_heads, problem.num_kv_heads + 1),
            around(problem.batch_size, batches[group_of(problem, arch)]),
            around(problem.max_seq_len or 0, lengths[group_of(problem, arch), problem.batch_size]),
        )
        for problem, arch in points
    ]


def group_of(problem: DecodeProblem, arch: Arch) -> tuple[object, ...]:
    """What problems of one kernel share, and how many KV heads they have."""
    return (*exact_of(problem, arch), problem.num_kv_heads)


def around(n: int, measured: Iterable[int]) -> Bucket:
    """The integers closer to `n`, by ratio, than to the other `measured` ones, or within EDGE on a side that has none."""
    ordered = sorted(measured)
    limits = {pair: math.ceil(math.sqrt(pair[0] * pair[1])) for pair in pairwise(ordered)}
    low = next((limits[pair] for pair in limits if pair[1] == n), math.ceil(n / EDGE))
    high = next((limits[pair] for pair in limits if pair[0] == n), math.ceil(n * EDGE))
    return Bucket(low, max(high, low + 1))


def entry_of(finding: Finding, cell: Cell, commit: str) -> Entry:
    """The line of a plan table for a finding that wins."""
    measured = Measured(round(finding.us, 4), round(finding.heuristic_us, 4), commit)
    return Entry(exact_of(finding.problem, finding.arch), cell, finding.config, measured)


def updated(entries: Iterable[Entry], findings: Sequence[tuple[Finding, Cell]], commit: str) -> list[Entry]:
    """A table after a run: entries that were measured again are replaced, or dropped if nothing beats the heuristic now."""
    new = [entry_of(finding, cell, commit) for finding, cell in findings if finding.wins]
    spans = [(exact_of(finding.problem, finding.arch), cell) for finding, cell in findings]
    kept = [entry for entry in entries if not any(entry.overlaps(*span) for span in spans)]
    return sorted([*kept, *new], key=Entry.order)
