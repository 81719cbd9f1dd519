"""Which keys some query rows of a request see, and which query rows see some keys: the backward skips the rest.

`row` is one opened request (query_rows.Row). Positions are those of query_rows.position_of.
"""

import cutlass
from cutlass import Boolean, Int32, Int64

from ...config.backward import BackwardSpec
from .query_rows import Queries, Row, end_seen, first_seen, position_of


def keys_seen(spec: BackwardSpec, queries: Queries, row: Row, first: Int32, stop: Int32) -> tuple[Int32, Int32]:
    """Keys [begin, end) outside which no query row of [first, stop) sees a key; begin = end if they see none."""
    some, last = first < stop, stop - 1
    end = cutlass.max(end_seen(spec, queries, row, position_of(spec, row, last)), 0)
    end = cutlass.select_(some, end, 0)
    if not spec.modifiers.window_left:
        return Int32(0), end
    return cutlass.min(first_seen(spec, queries, position_of(spec, row, first)), end), end


def rows_seeing(spec: BackwardSpec, queries: Queries, row: Row, low: Int32, high: Int32) -> tuple[Int32, Int32]:
    """Query rows [first, stop) outside which no query row sees a key from `low` to `high`, both included."""
    begin, first, stop = Int64(position_of(spec, row, Int32(0))), Int32(0), row.queries
    if spec.modifiers.causal != "none":
        first = within(Int64(low) - begin, row.queries)
    elif spec.modifiers.window_right:
        first = within(Int64(low) - begin - queries.window_right, row.queries)
    if spec.modifiers.window_left:
        stop = within(Int64(high) - begin + queries.window_left + 1, row.queries)
    return first, cutlass.max(first, stop)


def within(number: Int64, most: Int32) -> Int32:
    """`number`, clamped to the range from 0 to `most`."""
    return Int32(cutlass.max(Int64(0), cutlass.min(number, Int64(most))))


def sees(spec: BackwardSpec, queries: Queries, position: Int32, key: Int32) -> Boolean:
    """Whether the masks let a query row at `position` see a key."""
    seen = Boolean(True)
    if spec.modifiers.causal != "none":
        seen = key <= position
    elif spec.modifiers.window_right:
        seen = key - position <= queries.window_right
    if spec.modifiers.window_left:
        seen = seen & (position - key <= queries.window_left)
    return seen


def all_see(spec: BackwardSpec, queries: Queries, positions: tuple[Int32, Int32], keys: tuple[Int32, Int32]) -> Boolean:
    """Whether query rows from the first to the last position see all keys from the first to the last."""
    seen = Boolean(True)
    if spec.modifiers.causal != "none":
        seen = keys[1] <= positions[0]
    elif spec.modifiers.window_right:
        seen = keys[1] - positions[0] <= queries.window_right
    if spec.modifiers.window_left:
        seen = seen & (positions[1] - keys[0] <= queries.window_left)
    return seen
