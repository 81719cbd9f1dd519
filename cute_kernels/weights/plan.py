"""The plan of attention weights: select -> can_implement -> run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ..attention.operands import Passage
from ..config.weights import WeightsSpec
from ..kv.page_table import PageTable
from ..kv.tensors import check_page_table
from ..kv.types import QUERY_DTYPES
from ..planning.base import LAUNCH_ERRORS, SKU_ARCH, FlaggingPlan, PrecisionGuarantee, Sku, selected
from ..planning.checked import Checked, refuse_compile_in_capture, refuse_unknown
from ..planning.variants import Candidate, DeviceFacts, Launch, PlanPreference
from .checks import OUTPUTS, Given, Operands, WeightsRules, check, viewed
from .descriptor import AttentionWeightsDescriptor
from .variants import explain

if TYPE_CHECKING:
    from typing_extensions import Unpack

F32_WEIGHT_ULPS = 128  # an lse's error is at most 1e-5 of its size, and so is a weight's: 84 f32 ulps


class AttentionWeights(NamedTuple):
    """The outputs that a run wrote; None for those that the descriptor does not ask for."""

    weights: Tensor | None
    mean: Tensor | None
    page_mass: Tensor | None


class AttentionWeightsPlan(FlaggingPlan):
    """The softmax weights of one query row per request over a paged or a contiguous cache of K. Needs no workspace."""

    descriptor: AttentionWeightsDescriptor

    def __init__(self, descriptor: AttentionWeightsDescriptor, device: torch.device, preference: PlanPreference) -> None:
        facts, rules = preference.part_of(DeviceFacts.of(device)), WeightsRules.of(descriptor, device)
        explanation = explain(descriptor, facts, preference)
        super().__init__(device, facts.sm_count, _sku(descriptor, explanation.chosen), explanation)
        self.descriptor, self._rules, self._validate = descriptor, rules, preference.validate
        self._asked = {name: (shape, descriptor.output_dtype(name)) for name, shape in rules.outputs.items()}
        self._check: Checked[Operands, Passage] = Checked(partial(check, rules))
        spec: WeightsSpec | None = explanation.chosen.spec
        window_left, _, softcap = descriptor.launch_values
        status = self._words.data_ptr() if spec else self._words  # the CPU variant writes the words themselves
        self._constants = (descriptor.scale, descriptor.max_seq_len, window_left, softcap, status)
        self._launch = _launch_of(spec, descriptor)

    @classmethod
    def select(
        cls,
        descriptor: AttentionWeightsDescriptor,
        device: torch.device | str | None = None,
        preference: PlanPreference | None = None,
    ) -> AttentionWeightsPlan:
        """As PagedDecodePlan.select."""
        return selected(cls, AttentionWeightsDescriptor, descriptor, device, preference)

    def can_implement(self, q: Tensor, k_cache: Tensor, lse: Tensor, page_table: PageTable, **given: Unpack[Given]) -> None:
        """Checks shapes, dtypes, strides, alignment, devices and overlap as `run` does; raises its typed errors.

        Outputs that are not given count as new tensors.
        """
        check_page_table(self.descriptor.table_format, page_table)
        refuse_unknown(given, Given.__annotations__)
        known: dict[str, Any] = {**dict.fromkeys(Given.__annotations__), **given}
        outputs = self._outputs(*(known.pop(name) for name in OUTPUTS))
        slopes = known.pop("alibi_slopes")
        self._check.now(Operands(q, k_cache, *page_table.operands, known.pop("k_scale"), lse, slopes, *outputs, **known))

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        lse: Tensor,
        page_table: PageTable,
        *,
        k_scale: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        weights: Tensor | None = None,
        mean: Tensor | None = None,
        page_mass: Tensor | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> AttentionWeights:
        """Launches on the current or the given stream and returns the outputs that the descriptor asks for, fully written.

        q: [batch, num_heads, head_dim], also with one unit query axis; k_cache: 4-D in the descriptor's layout, an fp8 cache also
        as bytes (uint8); lse: f32 [batch, num_heads], any strides, as a decode plan returned it for these operands; k_scale
        and alibi_slopes: as PagedDecodePlan.run takes them. page_table: of the descriptor's format, `PageTable.whole()` if
        that is "none".

        weights: [batch, num_heads, max_seq_len] of weights_dtype, strides and address multiples of the descriptor's store_bytes;
        mean: f32 [batch, max_seq_len]; page_mass: f32 [batch, max_pages]. An output that is asked for and not given is
        allocated, and nothing else is. No host-device synchronisation.

        With the lse of other operands a weight is still exp(score - lse), which may be infinite; a key that does not count has
        weight 0 with any lse. Raises, before anything is written, InvalidProblem (an extent), InvalidArgument
        (type, dtype, device, overlap), MisalignedOperand, Unsupported (strides); then LaunchFailed. Bad lengths and page ids on
        the device are masked and recorded for `status`, as in decode, and so is a row of more than max_seq_len keys; under
        PlanPreference(validate=True) they raise InvalidArgument before anything is written, which synchronises.
        """
        check_page_table(self.descriptor.table_format, page_table)
        outputs = self._outputs(weights, mean, page_mass)
        operands = Operands(q, k_cache, *page_table.operands, k_scale, lse, alibi_slopes, *outputs)
        if stream is None and not self._elsewhere():
            self._run(operands)
        else:
            with self._on(stream):
                self._run(operands)
        return outputs

    def _outputs(self, weights: Tensor | None, mean: Tensor | None, page_mass: Tensor | None) -> AttentionWeights:
        """The outputs of a run, with a new tensor for each output that is asked for and not given."""
        given = AttentionWeights(weights, mean, page_mass)
        new = {
            name: torch.empty(shape, dtype=dtype, device=self.device)
            for name, (shape, dtype) in self._asked.items()
            if getattr(given, name) is None
        }
        return given._replace(**new)

    def _run(self, operands: Operands) -> None:
        passage = self._check(operands)
        if passage is Passage.NOTHING:
            return
        given, operands = operands, viewed(self._rules, operands, passage)
        if self._validate:
            self._check_metadata(operands)
        if passage is Passage.EMPTY:
            for name in self._asked:
                getattr(given, name).zero_()
            return
        try:
            self._launch(*operands, *self._constants)
        except LAUNCH_ERRORS as error:
            raise self._launch_failed(error) from error

    def _check_metadata(self, operands: Operands) -> None:
        """Raises InvalidArgument for the first row whose length, indptr or page ids break their rule; synchronises."""
        from .reference import counted_keys, first_bad_row

        self._refuse_capture("validate")
        table = PageTable(self.descriptor.table_format, (operands.table0, operands.table1, operands.table2))
        fault = first_bad_row(self.descriptor, operands, table, counted_keys(self.descriptor, operands, table))
        if fault is not None:
            raise fault.error(table)


def _sku(descriptor: AttentionWeightsDescriptor, chosen: Candidate) -> Sku:
    """Identifies what runs, with its precision: a weight is as exact as its lse, and rounded once."""
    dtypes = (QUERY_DTYPES[descriptor.q_dtype].value, descriptor.problem.cache_type, descriptor.weights_type)
    guarantee = PrecisionGuarantee(batch_invariant=True)
    if descriptor.weights_dtype in (None, torch.float32):
        guarantee = replace(guarantee, norm_ulps=F32_WEIGHT_ULPS, element_ulps=F32_WEIGHT_ULPS)
    return Sku("attention_weights", *dtypes, SKU_ARCH[chosen.arch], chosen.variant, chosen.spec, guarantee)


def _launch_of(spec: WeightsSpec | None, descriptor: AttentionWeightsDescriptor) -> Launch:
    """The callable that launches a chosen variant, compiled now; the CPU variant if there is no spec."""
    if spec is None:
        from .reference import cpu_variant

        return cpu_variant(descriptor)
    from ..compile.kernels import compile_weights

    refuse_compile_in_capture(spec)
    return compile_weights(spec)
