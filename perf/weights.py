"""Attention weights: the cases with their bars, a run's inputs, and the gate, weight by weight against f64."""

from __future__ import annotations

from collections.abc import Callable

import torch

import cute_kernels as ck
from perf.cases import Bar, Case, EightBit, Scale, Spread, fixed, weights_case
from perf.correctness import GateResult, Tolerance
from perf.inputs import DTYPES, Inputs
from perf.storage import storage

K = 1024
STORAGE: tuple[tuple[EightBit | None, Scale | None], ...] = ((None, None), ("e4m3", None), ("int8", "token-f16"))
LONG_BAR = Bar("ratio", 1.15)  # relative to a read of K and of as many bytes as the result has
ROWS = (
    fixed(64, 8 * K),
    fixed(128, 4 * K),
    fixed(8, 8 * K),
    fixed(64, K),
    fixed(1, 8 * K),
    Spread("loguniform", 64, 128, 32 * K),
)
BARRED = ROWS[:2]
WEIGHT_TOLERANCE = 1e-5  # relative, times the largest of 1 and the terms that a weight's score is summed from: as for an lse


def weights_cases() -> dict[Case, Bar | None]:
    """32/8 heads of 128 over pages of 16, in each storage."""
    return {
        weights_case(rows, kv_dtype=kv_dtype, kv_scale=kv_scale): LONG_BAR if rows in BARRED and kv_dtype is None else None
        for kv_dtype, kv_scale in STORAGE
        for rows in ROWS
    }


def weights_descriptor(case: Case) -> ck.AttentionWeightsDescriptor:
    """The descriptor of a case: weights in f32, their mean, and for a paged cache the mass of each page."""
    stored = storage(case)
    return ck.AttentionWeightsDescriptor(
        batch_size=case.batch_size,
        num_heads=case.num_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        page_size=case.page_size or None,
        q_dtype=DTYPES[case.dtype],
        max_seq_len=max(case.tokens()),
        layout=ck.KVLayout(case.layout),
        table_format=case.table_format if case.page_size else "lengths",
        mean=True,
        page_mass=case.page_size > 0,
        **{name: stored[name] for name in ("kv_dtype", "k_scale") if name in stored},
    )


def judge_weights(inputs: Inputs, index: int, call: Callable[[], ck.AttentionWeights], tolerance: Tolerance) -> GateResult:
    """The verdict on a result on set `index`: every weight, mean and mass by itself, against f64.

    used: the largest part of its allowance that any of them has used; above 1 it fails.
    """
    result, worst, where = call(), 0.0, ""
    for row in range(inputs.case.batch_size):
        exact, allowed = exact_weights(inputs, index, row)
        for name, got in result._asdict().items():
            if got is not None:
                error = (got[row].double() - output_of(name, exact, inputs.case.page_size)).abs()
                limit = output_of(name, allowed, inputs.case.page_size) + torch.finfo(torch.float32).tiny
                used = float((error / limit).nan_to_num(nan=torch.inf).amax())
                if used > worst:
                    worst, where = used, f"{name} of row {row} of set {index}"
    reason = f"{where}: an error of {worst:.3g} times what is allowed" if worst > 1 else ""
    return GateResult(None, None, None, worst <= 1, reason, tolerance=tolerance, used=worst)


def exact_weights(inputs: Inputs, index: int, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(the weights of a row, the error allowed to each), f64 [num_heads, longest row]."""
    case, length = inputs.case, inputs.case.tokens()[row]
    group = case.num_heads // case.num_kv_heads
    q, k = inputs.sets[index].q[row].double(), inputs.row(index, row)[0].double().repeat_interleave(group, 0)
    scores, sizes = (torch.einsum("hd,htd->ht", *both) * inputs.softmax_scale for both in ((q, k), (q.abs(), k.abs())))
    exact, allowed = torch.zeros(2, case.num_heads, max(case.tokens()), dtype=torch.float64, device=q.device)
    exact[:, :length] = scores.softmax(-1)
    summed_from = torch.maximum(sizes, scores.logsumexp(-1, keepdim=True).abs().clamp(min=1))
    allowed[:, :length] = 2 * WEIGHT_TOLERANCE * exact[:, :length] * summed_from  # a lse's part, and a score's
    return exact, allowed


def output_of(name: str, weights: torch.Tensor, page_size: int) -> torch.Tensor:
    """The output `name` that follows from a row's weights [num_heads, keys]."""
    if name == "weights":
        return weights
    mean = weights.mean(0)
    return mean if name == "mean" else page_sums(mean, page_size)


def page_sums(mean: torch.Tensor, page_size: int) -> torch.Tensor:
    """The sums of `mean` [keys] over each page."""
    pages = -(-len(mean) // page_size)
    return torch.nn.functional.pad(mean, (0, pages * page_size - len(mean))).view(pages, page_size).sum(-1)
