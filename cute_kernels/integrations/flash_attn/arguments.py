"""flash-attention's arguments in the words of this package: what is taken, renamed, ignored and refused."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...checks.fields import is_int
from ...checks.tensors import check_tensors
from ...errors import InvalidArgument, InvalidProblem, Unsupported
from ...planning.variants import DeviceFacts, PlanPreference

NO_WINDOW = (-1, -1)
ALIASES = {"block_table": "page_table", "learnable_sink": "s_aux", "return_softmax_lse": "return_attn_probs"}
IGNORED = frozenset({"num_splits", "pack_gqa", "scheduler_metadata", "deterministic"})  # of speed alone, or always so
# the values that ask for nothing, and why others are refused
UNSERVED: dict[str, tuple[tuple[object, ...], str]] = {
    "qv": ((None,), "a second product with V's columns is not computed"),
    "q_descale": ((None,), "q has 16 bits and is used exactly as it is: scale it, or softmax_scale"),
    "attention_chunk": ((None, 0), "chunks of attention are not masked; window_size and causal are served"),
    "dropout_p": ((None, 0, 0.0), "inference has no dropout"),
    "seqused_q": ((None,), "every row between two entries of cu_seqlens_q is a query row"),
}


class Scores(NamedTuple):
    """How scores are scaled, masked and capped, and how many SMs are left to others. As PagedAttentionDescriptor has them."""

    causal: str | None
    window_left: int | None
    window_right: int | None
    softcap: float | None
    softmax_scale: float | None
    sm_margin: int

    @property
    def masks(self) -> tuple[str | None, int | None, int | None, float | None]:
        """As `attention_plan` takes them."""
        return self[:4]

    @property
    def positional(self) -> bool:
        """Whether what a query row sees depends on its position."""
        return not self.causal is self.window_left is self.window_right is None


def scores_of(causal: bool, window_size: Any, softcap: float, softmax_scale: float | None, sm_margin: int) -> Scores:
    """flash-attention's masks: a bound of a window that is negative or None is none, causal is at the bottom right.

    Raises InvalidProblem for a window of other than two bounds and for a sm_margin that is no int from 0 on.
    """
    if type(window_size) is not tuple:
        if not isinstance(window_size, (Sequence, Tensor)):
            raise InvalidProblem("window_size", window_size, "must be (left, right), each an int, negative for no bound")
        window_size = tuple(window_size)
    return _scores(causal, window_size, softcap, softmax_scale, sm_margin)


@functools.lru_cache(maxsize=1024)
def _scores(causal: bool, window_size: tuple[Any, ...], softcap: float, softmax_scale: float | None, sm_margin: int) -> Scores:
    if len(window_size) != 2:
        raise InvalidProblem("window_size", window_size, "must be (left, right), each an int, negative for no bound")
    if not is_int(sm_margin) or sm_margin < 0:
        raise InvalidProblem("sm_margin", sm_margin, "must be an int from 0 to the SMs of the device, less one")
    left, right = (None if bound is None or int(bound) < 0 else int(bound) for bound in window_size)
    at_the_end = bool(causal) or right == 0  # both hide what comes after the row's own key
    return Scores(
        "bottom_right" if at_the_end else None, left, None if at_the_end else right, softcap or None, softmax_scale, sm_margin
    )


def preference_of(sm_margin: int, device: torch.device) -> PlanPreference | None:
    """What leaves sm_margin SMs to others; None where there are none to leave. Raises InvalidProblem where none would stay."""
    if sm_margin == 0:
        return None
    facts = DeviceFacts.of(device)
    if sm_margin >= facts.sm_count:
        raise InvalidProblem("sm_margin", sm_margin, f"must be less than {facts.sm_count}, the SMs of {facts.name}")
    return PlanPreference(sm_count=facts.sm_count - sm_margin)


def settled(others: dict[str, Any], **named: Any) -> list[Any]:
    """The values of `named`, each as given or under the other library's name for it.

    Raises Unsupported for an argument of UNSERVED, InvalidArgument for one that is given under both names, TypeError for a name
    that neither library has.
    """
    for name, value in others.items():
        if name in named:
            named[name] = value
        elif name in UNSERVED:
            neutral, reason = UNSERVED[name]
            if isinstance(value, Tensor) or value not in neutral:
                shown = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
                raise Unsupported([f"{name} = {shown}: {reason}"])
        elif (own := ALIASES.get(name)) in named:
            if value is None or value is False:
                continue
            if named[own] is not None and named[own] is not False:
                raise InvalidArgument(name, f"is given beside {own}, must be alone: both are names of one argument")
            named[own] = value
        elif name not in IGNORED:
            raise TypeError(f"got an unexpected keyword argument {name!r}")
    return list(named.values())


def check_inference(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises InvalidArgument for what is no tensor, Unsupported where a gradient is to be recorded."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        check_tensors(q=q, k=k, v=v)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        name = next(name for name, tensor in (("q", q), ("k", k), ("v", v)) if tensor.requires_grad)
        why = "this is for inference, and cute_kernels.paged_attention is differentiable; call it under torch.no_grad()"
        raise Unsupported([f"{name}.requires_grad = True: {why}"])


def for_all_requests(name: str, tensor: Tensor | None) -> Tensor | None:
    """[heads] of a tensor [batch, heads] that is the same for every request by its strides; any other tensor as it is.

    Raises Unsupported where each request has its own values: they lie on the device.
    """
    if tensor is None or not isinstance(tensor, Tensor) or tensor.dim() != 2:
        return tensor
    if tensor.shape[0] > 1 and tensor.stride(0) != 0:
        rule = "values of each request's own are not served; [heads], or that expanded to [batch, heads], is"
        raise Unsupported([f"{name} = a tensor {list(tensor.shape)} with strides {tensor.stride()}: {rule}"])
    return tensor[0] if tensor.shape[0] else tensor.new_ones(tensor.shape[1])
