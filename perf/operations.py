"""How each operation is measured: one table, by the name that a case gives its operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from perf.append_inputs import judge_append, make_append_inputs
from perf.backward import judge_backward
from perf.cases import Operation
from perf.correctness import GateResult, Tolerance, judge_attention
from perf.inputs import make_inputs
from perf.weights import judge_weights


@dataclass(frozen=True)
class Procedure:
    """The functions that measure an operation. Its floor, which the readers of records need too, is `Case.floor`.

    make(case, device, memory_bytes, rotated_bytes): makes the providers' inputs. Raises MemoryError. judge(inputs, index, call,
    tolerance): runs `call` on set `index` and judges the result. has_query: whether a preceding kernel may write the operation's
    q, so that it is also timed in a stream after such a kernel.
    """

    make: Callable[..., Any]
    judge: Callable[[Any, int, Callable[[], Any], Tolerance], GateResult]
    has_query: bool


PROCEDURES: dict[Operation, Procedure] = {
    "decode": Procedure(make_inputs, judge_attention, has_query=True),
    "attention": Procedure(make_inputs, judge_attention, has_query=True),
    "append": Procedure(make_append_inputs, judge_append, has_query=False),
    "weights": Procedure(make_inputs, judge_weights, has_query=True),
    "backward": Procedure(make_inputs, judge_backward, has_query=False),
}
