"""The base of FlashInfer's batch classes: where tables live, the plan that a plan() call selects, and its run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from ...api.plan_cache import alignment, rounded_rows
from ...attention.attention_descriptor import PagedAttentionDescriptor
from ...attention.attention_plan import PagedAttentionPlan
from ...attention.descriptors import PagedDecodeDescriptor
from ...attention.plan import PagedDecodePlan
from ...errors import InvalidArgument, InvalidProblem, MisalignedOperand
from ...kv.page_table import PageTable
from ...kv.scale import KVScale
from ...planning.variants import PlanPreference
from .arguments import Scores, layout_named, scaled

Options = ParamSpec("Options")
Wrapper = TypeVar("Wrapper", bound="BatchWrapper")
Launch = Callable[..., tuple[Tensor, Tensor]]
Key = tuple[int, bool, bool, bool]  # rows of q if plans differ by them, else 0; whether sinks, k_scale and v_scale are given
PLAIN: Key = (0, False, False, False)
Scale = float | Tensor | None


def all_or_nothing(plan: Callable[Concatenate[Wrapper, Options], None]) -> Callable[Concatenate[Wrapper, Options], None]:
    """Returns the method, changed so that its wrapper and the buffers stay as they were if it raises."""

    @wraps(plan)
    def planned(self: Wrapper, /, *args: Options.args, **options: Options.kwargs) -> None:
        with self.planning():
            plan(self, *args, **options)

    return planned


class BatchWrapper:
    """A wrapper with a workspace of its own, made once: the caller's buffer, which nobody has zeroed, only names the device."""

    run: Callable[..., Any]
    forward: Callable[..., Any]

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str, use_cuda_graph: bool, buffers: dict[str, Tensor | None]
    ) -> None:
        self.device = float_workspace_buffer.device
        self.is_cuda_graph_enabled = use_cuda_graph
        self._layout = layout_named(kv_layout)
        for name, buffer in buffers.items() if use_cuda_graph else ():
            if not isinstance(buffer, Tensor) or buffer.dtype != torch.int32 or buffer.device != self.device:
                raise InvalidArgument(name, f"must be an int32 tensor on {self.device} beside use_cuda_graph = True")
        self._buffers = buffers if use_cuda_graph else {}
        self._workspaces: list[Tensor] = []  # the last is the largest; captured graphs may use the others
        self._scales: dict[float, Tensor] = {}
        self._aligned: int | None = None  # bytes, if strides or pointers of caches are less aligned than those of compact caches
        self._launches: dict[Key, Launch] = {}
        self._scores: Scores | None = None
        self._slopes: Tensor | None = None
        self._rows_of_q = False
        self._total_q: int | None = None  # rows that q must have, if plan() could know the number
        self._copies: list[tuple[Tensor, Tensor, bool]] | None = None  # made into buffers once the current plan() succeeds

    def run_return_lse(self, *args: Any, **options: Any) -> Any:
        """`run` with return_lse."""
        return self.run(*args, **{**options, "return_lse": True})

    def forward_return_lse(self, *args: Any, **options: Any) -> Any:
        """`forward` with return_lse."""
        return self.forward(*args, **{**options, "return_lse": True})

    def end_forward(self) -> None:
        """Does nothing, like FlashInfer's."""

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor | None = None) -> None:
        """Changes nothing: the workspace is the wrapper's own. Raises InvalidArgument for a buffer on another device."""
        if float_workspace_buffer.device != self.device:
            rule = f"is on {float_workspace_buffer.device}, must be on {self.device}, as the wrapper's first"
            raise InvalidArgument("float_workspace_buffer", rule)

    @contextmanager
    def planning(self) -> Iterator[None]:
        """A context for a plan(): if it raises, the wrapper is as before, and no buffer has been written."""
        before, outermost = dict(self.__dict__), self._copies is None
        if outermost:
            self._copies = []
        try:
            yield
            if outermost:
                for buffer, tensor, non_blocking in self._copies or ():
                    buffer[: len(tensor)].copy_(tensor, non_blocking=non_blocking)
                self._copies = None
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _place(self, name: str, buffer_name: str, tensor: Tensor, non_blocking: bool, extent: int | None = None) -> Tensor:
        """Returns a table as int32 on the device; with use_cuda_graph, returns its buffer, to whose front it will be copied.

        extent: the entries that the table must have, None for any number. Raises InvalidArgument, InvalidProblem.
        """
        if not isinstance(tensor, Tensor) or tensor.is_floating_point():
            got = f"has dtype {tensor.dtype}" if isinstance(tensor, Tensor) else f"got {type(tensor).__name__}"
            raise InvalidArgument(name, f"{got}, must be a tensor of integers")
        if tensor.dim() != 1 or extent not in (None, len(tensor)):
            wanted = "one axis" if extent is None else f"{extent} entries, as the batch says"
            raise InvalidProblem(f"{name}.shape", tuple(tensor.shape), f"must have {wanted}")
        buffer = self._buffers.get(buffer_name)
        if buffer is None:
            return tensor.to(self.device, torch.int32, non_blocking=non_blocking)
        if len(tensor) > len(buffer) or (len(tensor) < len(buffer) and not name.endswith("indices")):
            rule = "at most" if name.endswith("indices") else "exactly"
            raise InvalidProblem(f"{name}.shape", tuple(tensor.shape), f"must have {rule} the {len(buffer)} of {buffer_name}")
        if self._copies is not None:
            self._copies.append((buffer, tensor, non_blocking))
        return buffer

    def _place_pages(
        self, prefix: str, ending: str, indptr: Tensor, indices: Tensor, last_page_len: Tensor, non_blocking: bool
    ) -> tuple[PageTable, int]:
        """Returns the page table and its number of requests. prefix: of the arguments' names; ending: of the buffers' names."""
        buffer = f"paged_kv_{{}}_{ending}".format
        last = self._place(f"{prefix}last_page_len", buffer("last_page_len"), last_page_len, non_blocking)
        bounds = self._place(f"{prefix}indptr", buffer("indptr"), indptr, non_blocking, len(last) + 1)
        pages = self._place(f"{prefix}indices", buffer("indices"), indices, non_blocking)
        return PageTable.csr(bounds, pages, last), len(last)

    def _settle(
        self,
        fields: dict[str, Any],
        scores: Scores,
        table: PageTable,
        *,
        qo_indptr: Tensor | None = None,
        rows_of_q: bool = False,
        preference: PlanPreference | None = None,
    ) -> None:
        """Keeps what was planned and selects its plan. fields: the descriptor's, except scores, layout and what a run adds.

        qo_indptr: None if the fields are a PagedDecodeDescriptor's. rows_of_q: whether the rows of a run's q decide max_q_len.
        """
        self._fields, self._table, self._qo_indptr, self._rows_of_q = fields, table, qo_indptr, rows_of_q
        self._preference = preference
        self._rescore(scores)

    def _score_anew(self, scores: Scores) -> None:
        """Replaces the planned scores by those that `forward` is given."""
        if self._scores not in (None, scores):
            self._rescore(scores)

    @all_or_nothing
    def _rescore(self, scores: Scores) -> None:
        self._scores = scores
        self._slopes = scores.slopes(self._fields["num_heads"], self.device)
        self._launches = {}
        if not self._rows_of_q:
            self._select(PLAIN)

    def _select(self, key: Key) -> Launch:
        """Selects the plan for the planned fields and the additions of a run (`key`), and returns its launch."""
        if self._scores is None:
            raise InvalidArgument("plan", "must be called before run")
        rows, sinks, k_scale, v_scale = key
        scales = {name: KVScale.TENSOR for name, given in (("k_scale", k_scale), ("v_scale", v_scale)) if given}
        fields = {**self._fields, **self._scores.fields(), "sinks": sinks, **scales}
        fields["layout"] = self._layout if self._aligned is None else self._layout.with_alignment(self._aligned)
        if self._rows_of_q:
            fields["max_q_len"] = rounded_rows(rows)
        given: dict[str, Any] = {"page_table": self._table, "alibi_slopes": self._slopes}
        plan: PagedAttentionPlan | PagedDecodePlan
        if "max_q_len" in fields:
            fields["causal"] = "bottom_right" if self._scores.causal else None
            plan = PagedAttentionPlan.select(PagedAttentionDescriptor(**fields), self.device, self._preference)
            given["qo_indptr"] = self._qo_indptr
        else:
            plan = PagedDecodePlan.select(PagedDecodeDescriptor(**fields), self.device, self._preference)
        launch = self._launches[key] = partial(plan.run, workspace=self._workspace_of(plan), **given)
        return launch

    def _workspace_of(self, plan: PagedAttentionPlan | PagedDecodePlan) -> Tensor:
        """A workspace that is large enough. A workspace made within a graph capture belongs to that graph."""
        if self._workspaces and self._workspaces[-1].numel() >= plan.workspace_size():
            return self._workspaces[-1]
        workspace = plan.new_workspace()
        if not self._capturing():
            self._workspaces.append(workspace)
        return workspace

    def _capturing(self) -> bool:
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        sinks: Tensor | None = None,
        q_scale: float | None = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
    ) -> Any:
        """Runs the plan. Returns out, or (out, lse) if return_lse is True.

        Raises InvalidProblem for a q whose number of rows is not the planned one.
        """
        if self._total_q is not None and q.shape[0] != self._total_q:
            raise InvalidProblem("q.shape", tuple(q.shape), f"must have {self._total_q} rows, as plan() was told")
        if q.stride(-1) != 1:
            q = q.contiguous()
        if q_scale is not None:
            k_scale = scaled(q_scale, k_scale)
        if self._slopes is not None and self._scores is not None:
            self._scores.refuse_what_alibi_changes(return_lse or lse is not None, sinks)
        if not k_scale is v_scale is None:
            k_scale, v_scale = self._scale_tensor(k_scale), self._scale_tensor(v_scale)
        key = (q.shape[0] if self._rows_of_q else 0, sinks is not None, k_scale is not None, v_scale is not None)
        launch = self._launches.get(key) or self._select(key)
        try:
            got = launch(q, k, v, out=out, lse=lse, sinks=sinks, k_scale=k_scale, v_scale=v_scale)
        except MisalignedOperand as error:
            launch = self._realigned(error, key, k, v)
            got = launch(q, k, v, out=out, lse=lse, sinks=sinks, k_scale=k_scale, v_scale=v_scale)
        return got if return_lse else got[0]

    def _scale_tensor(self, scale: Scale) -> Tensor | None:
        """A scale as a run takes it; None for 1."""
        if scale is None or isinstance(scale, Tensor):
            return scale
        if scale == 1:
            return None
        if self._capturing():  # in the graph's own memory, which each replay writes anew
            return torch.full((1,), scale, dtype=torch.float32, device=self.device)
        kept = self._scales.get(scale)
        if kept is None:
            kept = self._scales[scale] = torch.tensor([scale], dtype=torch.float32, device=self.device)
        return kept

    def _realigned(self, error: MisalignedOperand, key: Key, k: Tensor, v: Tensor) -> Launch:
        """The launch for caches of this alignment, if it caused `error`; raises `error` if it did not."""
        aligned = alignment(k, v)
        if not error.operand.startswith(("k_cache", "v_cache")) or (self._aligned is not None and aligned >= self._aligned):
            raise error
        self._aligned = aligned
        self._launches = {}
        return self._select(key)
