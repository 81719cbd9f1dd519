"""Appending to a paged KV cache: K and V of new tokens are rotated, converted or quantised, and stored in their slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..config.append import AppendSpec
from ..errors import InvalidArgument
from ..kv.page_table import PageTable
from ..planning.base import LAUNCH_ERRORS, SKU_ARCH, FlaggingPlan, PrecisionGuarantee, Sku, selected
from ..planning.checked import Checked, refuse_compile_in_capture, refuse_unknown
from ..planning.variants import DeviceFacts, Launch, PlanPreference
from .checks import AppendRules, Given, Operands, Views, check, normalised, slot_operands
from .descriptor import KVAppendDescriptor
from .variants import explain

if TYPE_CHECKING:
    from typing_extensions import Unpack


class KVAppendPlan(FlaggingPlan):
    """Appends K and V of new tokens to a paged cache. Needs no workspace."""

    descriptor: KVAppendDescriptor

    def __init__(self, descriptor: KVAppendDescriptor, device: torch.device, preference: PlanPreference) -> None:
        facts = preference.part_of(DeviceFacts.of(device))
        explanation = explain(descriptor, facts, preference)
        chosen = explanation.chosen
        spec = chosen.spec
        dtypes = (descriptor.element_type, descriptor.cache_type, descriptor.cache_type)
        guarantee = PrecisionGuarantee(batch_invariant=True, norm_factor=1.0, norm_ulps=0, element_factor=1.0, element_ulps=0)
        sku = Sku("kv_append", *dtypes, SKU_ARCH[chosen.arch], chosen.variant, spec, guarantee)
        super().__init__(device, facts.sm_count, sku, explanation)
        self.descriptor = descriptor
        rules = AppendRules(descriptor, device)
        self._check: Checked[Operands, Views | None] = Checked(lambda operands: check(rules, operands))
        self._validate = preference.validate
        self._status = self._words.data_ptr() if spec else self._words  # the CPU variant writes the words themselves
        self._launch = _launch_of(spec, descriptor)

    @classmethod
    def select(
        cls,
        descriptor: KVAppendDescriptor,
        device: torch.device | str | None = None,
        preference: PlanPreference | None = None,
    ) -> KVAppendPlan:
        """The first variant that serves `descriptor` on `device` (default: the current GPU, else the CPU), compiled.

        Raises Unsupported with every reason when no variant does, or when the one that `preference` forces does not;
        CompileFailed when the variant cannot be compiled, also inside a graph capture.
        """
        return selected(cls, KVAppendDescriptor, descriptor, device, preference)

    def can_implement(
        self, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor | PageTable, **given: Unpack[Given]
    ) -> None:
        """Checks shapes, dtypes, strides, alignment, devices and overlap as `run` does; raises its typed errors."""
        tables = slot_operands(self.descriptor, slots)
        refuse_unknown(given, Given.__annotations__)
        known: dict[str, Any] = {**dict.fromkeys(Given.__annotations__), **given}
        if known["q_out"] is None:
            known["q_out"] = known["q"]
        self._check.now(Operands(k, v, k_cache, v_cache, *tables, **known))

    def run(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slots: Tensor | PageTable,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        q: Tensor | None = None,
        q_out: Tensor | None = None,
        cos_sin_cache: Tensor | None = None,
        positions: Tensor | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> Tensor | None:
        """Launches on the current or the given stream; writes the tokens' slots of both caches, and no other slot.

        k, v: [tokens, num_kv_heads, head_dim] of the descriptor's dtype, at most num_tokens tokens, any strides with a unit
        last one. k_cache, v_cache: 4-D in the descriptor's layout, any strides with a unit last one, also interleaved in one
        allocation; uint8 or torch's fp8 for fp8.

        slots, table_format "none": [tokens] of slot_dtype, any stride, flat positions page * page_size + slot; a negative slot
        skips its token. Otherwise slots is a PageTable with one row per token. A row's length counts the new token, which is the
        row's last; a row of length 0 has no new token. Slots that are not skipped must differ: if two tokens share one, either
        may win, for K and V separately.

        k_scale, v_scale: as PagedDecodePlan.run takes them; scales per tensor and head are read, scales per token are written.

        With a rotary embedding: cos_sin_cache f32 [max_position, rotary_dim], the cosines first, and positions [tokens] of
        position_dtype. K is rotated and rounded to its dtype before it is stored. If rotary.num_heads is not 0, q
        [tokens, rotary.num_heads, head_dim] is rotated into q_out, which is returned; q_out may be q, and is allocated if absent.

        A token is skipped, and recorded for `status`, if its slot is at or past num_pages * page_size, its row's length does not
        fit the table, its row's last page is not in the cache, or cos_sin_cache lacks its position; under
        PlanPreference(validate=True) it raises InvalidArgument, which synchronises. The position of a token that its slot or row
        skips is no fault. A q row stays unrotated only if cos_sin_cache lacks its position. A scale that f16 cannot hold is
        recorded, or raised, in the same way, and the token is stored, saturated (docs/numerics.md).

        The stored values are those of `apply_rotary` and `quantize_kv`, bit for bit except the payload of a NaN. Allocates
        nothing else, does not synchronise. Raises, before anything is written, InvalidProblem (an extent), InvalidArgument (type,
        dtype, device, overlap, a slot), MisalignedOperand, Unsupported (strides); then LaunchFailed.
        """
        tables = slot_operands(self.descriptor, slots)
        if q_out is None and isinstance(q, Tensor):
            q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        operands = Operands(k, v, k_cache, v_cache, *tables, k_scale, v_scale, q, q_out, cos_sin_cache, positions)
        if stream is None and not self._elsewhere():
            self._run(operands)
            return q_out
        with self._on(stream):
            self._run(operands)
        return q_out

    def _run(self, operands: Operands) -> None:
        views = self._check(operands)
        if views is not None:
            operands = normalised(self.descriptor, operands, views)
        if not operands.k.shape[0]:
            return
        if self._validate:
            self._check_metadata(operands)
        try:
            self._launch(*operands, self._status)
        except LAUNCH_ERRORS as error:
            raise self._launch_failed(error) from error

    def _check_metadata(self, operands: Operands) -> None:
        from .reference import first_error

        self._refuse_capture("validate")
        error = first_error(self.descriptor, operands)
        if error is not None:
            name, fault = error
            raise InvalidArgument(name, str(fault))


def _launch_of(spec: AppendSpec | None, descriptor: KVAppendDescriptor) -> Launch:
    """The callable that launches a chosen variant, compiled now; the CPU variant if there is no spec."""
    if spec is None:
        from .reference import cpu_variant

        return cpu_variant(descriptor)
    from ..compile.kernels import compile_append

    refuse_compile_in_capture(spec)
    return compile_append(spec)
