"""The order in which tables and pictures show cases."""

from __future__ import annotations

from perf.cases import OPERATIONS, Case

USUAL_HEADS = (32, 8, 128)


def reading_order(case: Case) -> tuple[object, ...]:
    """A sort key: operation, mixed batches last, then batch, longest row and query rows; among equals the usual heads first."""
    heads = (case.num_heads, case.num_kv_heads, case.head_dim)
    tokens = case.tokens()
    size = (case.batch_size, max(tokens, default=0), sum(tokens), case.q_rows)
    return (OPERATIONS.index(case.operation), case.mixed, *size, heads != USUAL_HEADS, heads, case.score_labels)
