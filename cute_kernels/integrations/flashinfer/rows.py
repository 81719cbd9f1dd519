"""The ragged query rows of batch prefill, shared by the wrappers over pages and over packed tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...api.plan_cache import length_hint, rounded_rows
from ...errors import InvalidProblem
from ...kv.page_table import PageTable
from ...planning.variants import PlanPreference
from .arguments import Scores
from .wrapper import BatchWrapper


class RaggedRows(BatchWrapper):
    """Knows how many query rows a plan() is for, and the most rows of a request."""

    _planned_rows: int | None = None  # the max_token_per_sequence that captured launches have

    def _settle_rows(
        self,
        fields: dict[str, Any],
        scores: Scores,
        table: PageTable,
        qo_indptr: Tensor,
        non_blocking: bool,
        max_token_per_sequence: int | None,
        max_sequence_kv: int | None,
        preference: PlanPreference | None,
    ) -> None:
        rows = self._place("qo_indptr", "qo_indptr_buf", qo_indptr, non_blocking, fields["batch_size"] + 1)
        self._total_q = int(qo_indptr[-1]) if qo_indptr.device.type == "cpu" else None
        most = self._most_rows(qo_indptr, max_token_per_sequence)
        hint = None if max_sequence_kv is None else length_hint(max_sequence_kv)
        fields = {**fields, "max_q_len": most, "max_seq_len": hint}
        self._settle(fields, scores, table, qo_indptr=rows, rows_of_q=most is None, preference=preference)

    def _most_rows(self, qo_indptr: Tensor, max_token_per_sequence: int | None) -> int | None:
        """Returns max_q_len, rounded up, or None if only the rows of a run's q bound it.

        A qo_indptr on the host is read, one on the device is not. A captured launch may be replayed with any division of its rows
        among requests, so its max_q_len is the number of its rows, or the first plan()'s max_token_per_sequence, which no later
        plan() may exceed. Raises InvalidProblem for a bound that some request would exceed, and for a plan() without a bound if
        captured launches have one.
        """
        host = qo_indptr.device.type == "cpu" and len(qo_indptr) > 1
        longest, given = int(qo_indptr.diff().max()) if host else None, max_token_per_sequence
        if given is not None and longest is not None and longest > given:
            rule = f"must be at least {longest}, the most rows of a request in qo_indptr"
            raise InvalidProblem("max_token_per_sequence", given, rule)
        if not self.is_cuda_graph_enabled:
            most = longest if given is None else given
            return None if most is None else rounded_rows(most)
        if self._planned_rows is not None:
            self._check_planned_rows(self._planned_rows, given, longest)
        elif given is None:
            return None
        else:
            self._planned_rows = given
        return rounded_rows(self._planned_rows)

    def _check_planned_rows(self, planned: int, given: int | None, longest: int | None) -> None:
        """Raises InvalidProblem if a request may have more rows than captured launches serve, `planned` by an earlier plan()."""
        beside = "the first plan()'s, beside use_cuda_graph = True"
        if given is not None and given > planned:
            raise InvalidProblem("max_token_per_sequence", given, f"must be at most {planned}, {beside}")
        if given is None and longest is None:
            rule = f"must be given beside a qo_indptr on the device, and at most {planned}, {beside}"
            raise InvalidProblem("max_token_per_sequence", None, rule)
        if longest is not None and longest > planned:
            rule = f"must be at most the max_token_per_sequence {planned}, {beside}"
            raise InvalidProblem("qo_indptr.diff().max()", longest, rule)
