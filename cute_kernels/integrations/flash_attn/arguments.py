"""flash-attention's arguments in the words of this package: which are taken, renamed, ignored and refused."""

from __future__ import annotations

import functools
import operator
from collections.abc import Hashable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...checks.tensors import check_tensors
from ...errors import CuteKernelsError, InvalidArgument, InvalidProblem, Unsupported
from ...planning.variants import DeviceFacts, PlanPreference
from .. import refuse_tensor, renamed, shown

NO_WINDOW = (-1, -1)
ALIASES = {
    "block_table": "page_table",
    "learnable_sink": "s_aux",
    "return_lse": "return_attn_probs",
    "return_softmax_lse": "return_attn_probs",
}
# options that change speed alone, or that always hold here; q_descale belongs to an 8-bit q, which is refused
IGNORED = frozenset({"num_splits", "pack_gqa", "scheduler_metadata", "deterministic", "q_descale"})
WINDOW_RULE = "must be (left, right), each an int, negative for no bound"
# for each argument, the values that ask for nothing, and why other values are refused
UNSERVED: dict[str, tuple[tuple[object, ...], str]] = {
    "qv": ((None,), "a second product with V's columns is not computed"),
    "q_v": ((None,), "a second product with V's columns is not computed"),
    "fa_version": ((None, 2, 3, 4), "the versions of flash-attention are 2, 3 and 4, and each has these results"),
    "cp_world_size": ((1,), "context parallelism is not served"),
    "cp_rank": ((0,), "context parallelism is not served"),
    "cp_tot_seqused_k": ((None,), "context parallelism is not served"),
    "attention_chunk": ((None, 0), "chunks of attention are not masked; window_size and causal are served"),
    "dropout_p": ((None, 0, 0.0), "inference has no dropout"),
    "seqused_q": ((None,), "every row between two entries of cu_seqlens_q is a query row"),
}
# the plans' names, and flash-attention's names for the same arguments
NAMES = {
    "k_scale": "k_descale",
    "max_q_len": "max_seqlen_q",
    "page_table.kv_indptr": "cu_seqlens_k",
    "q_dtype": "q.dtype",
    "qo_indptr": "cu_seqlens_q",
    "v_scale": "v_descale",
}


class Scores(NamedTuple):
    """How scores are scaled, masked and capped, as in PagedAttentionDescriptor, and how many SMs are left to other work."""

    causal: str | None
    window_left: int | None
    window_right: int | None
    softcap: float | None
    softmax_scale: float | None
    sm_margin: int

    @property
    def masks(self) -> tuple[str | None, int | None, int | None, float | None]:
        """The masks and the cap as `attention_plan` takes them."""
        return self[:4]

    @property
    def positional(self) -> bool:
        """Whether the keys that a query row sees depend on its position."""
        return not self.causal is self.window_left is self.window_right is None


def scores_of(causal: bool, window_size: Any, softcap: float, softmax_scale: float | None, sm_margin: int) -> Scores:
    """flash-attention's masks: a window's bound that is negative or None is no bound; causal is aligned to the bottom right.

    Raises InvalidProblem for a window without exactly two bounds and for a sm_margin that is no int from 0 on, InvalidArgument
    for a tensor in place of a value.
    """
    if type(window_size) is not tuple:
        window_size = _bounds(window_size)
    try:
        return _scores(causal, window_size, softcap, softmax_scale, sm_margin)
    except TypeError:  # an unhashable value: the checks in _scores name it
        return _scores.__wrapped__(causal, window_size, softcap, softmax_scale, sm_margin)


@functools.lru_cache(maxsize=1024)  # an error is not kept: a tensor, which is hashed by identity, is refused at every call
def _scores(causal: bool, window_size: tuple[Any, ...], softcap: float, softmax_scale: float | None, sm_margin: int) -> Scores:
    if len(window_size) != 2:
        raise InvalidProblem("window_size", window_size, WINDOW_RULE)
    rule = "must be an int from 0 to the SMs of the device, less one"
    sm_margin = whole("sm_margin", sm_margin, rule)
    if sm_margin < 0:
        raise InvalidProblem("sm_margin", sm_margin, rule)
    bounds = [-1 if bound is None else whole("window_size", bound, WINDOW_RULE) for bound in window_size]
    left, right = (None if bound < 0 else bound for bound in bounds)
    cap, scale = _number("softcap", softcap) or None, _number("softmax_scale", softmax_scale)
    at_the_end = flag("causal", causal) or right == 0  # both hide the keys after the row's own key
    return Scores("bottom_right" if at_the_end else None, left, None if at_the_end else right, cap, scale, sm_margin)


def _bounds(window_size: Any) -> tuple[Any, ...]:
    """Returns a window as a tuple. Raises InvalidArgument for a tensor on a device, InvalidProblem if it is no sequence."""
    if window_size is None:
        return NO_WINDOW
    if isinstance(window_size, Tensor) and window_size.device.type == "cpu":
        window_size = window_size.tolist()
    refuse_tensor("window_size", window_size)
    if not isinstance(window_size, Sequence):
        raise InvalidProblem("window_size", window_size, WINDOW_RULE)
    return tuple(window_size)


def flag(name: str, value: Any) -> bool:
    """Returns an option as a bool; 0, 1 and None, of any library, count too. Raises InvalidArgument for anything else."""
    refuse_tensor(name, value)
    if not isinstance(value, Hashable) or value not in (None, False, True):
        raise InvalidArgument(name, f"is {value!r}, must be True or False")
    return bool(value)


def whole(name: str, value: Any, rule: str) -> int:
    """Returns an int of any library as a Python int. Raises InvalidArgument for a tensor, InvalidProblem for other values."""
    refuse_tensor(name, value)
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool):
        raise InvalidProblem(name, value, rule)
    return number


def _number(name: str, value: Any) -> Any:
    """Returns a number of any library as a float; any other value is returned as it is, and the descriptor refuses it."""
    refuse_tensor(name, value)
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else value


def length_of(name: str, value: Any) -> int | None:
    """Returns a bound of lengths, given as an int or as a tensor [] on the host.

    A tensor on a device gives None, which is no bound: no call waits for its value. Raises InvalidArgument for a tensor of other
    axes, InvalidProblem for a value that is no int.
    """
    if isinstance(value, Tensor) and not value.dim():
        if value.device.type != "cpu":
            return None
        value = value.item()
    return whole(name, value, "must be an int from 0 on, or None")


def preference_of(sm_margin: int, device: torch.device) -> PlanPreference | None:
    """The preference that leaves sm_margin SMs to other work; None for 0. Raises InvalidProblem if no SM would remain."""
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
                raise Unsupported([f"{name} = {shown(value)}: {reason}"])
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
    """Raises InvalidArgument for a value that is no tensor, Unsupported if autograd would record a gradient."""
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        check_tensors(q=q, k=k, v=v)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        name = next(name for name, tensor in (("q", q), ("k", k), ("v", v)) if tensor.requires_grad)
        why = "this is for inference, and cute_kernels.paged_attention is differentiable; call it under torch.no_grad()"
        raise Unsupported([f"{name}.requires_grad = True: {why}"])


def for_all_requests(name: str, tensor: Tensor | None) -> Tensor | None:
    """Returns [heads] for a tensor [batch, heads] whose strides repeat it for every request; any other tensor as it is.

    Raises Unsupported if the strides let requests differ: the values lie on the device and are not compared.
    """
    if tensor is None or not isinstance(tensor, Tensor) or tensor.dim() != 2:
        return tensor
    if tensor.shape[0] > 1 and tensor.stride(0) != 0:
        rule = "values of each request's own are not served; [heads], or that expanded to [batch, heads], is"
        raise Unsupported([f"{name} = a tensor {list(tensor.shape)} with strides {tensor.stride()}: {rule}"])
    return tensor[0] if tensor.shape[0] else tensor.new_ones(tensor.shape[1])


def descales_of(k: Tensor, v: Tensor, k_descale: Tensor | None, v_descale: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Returns the descales of 8-bit K and V; a 16-bit tensor's descale is ignored. Raises what for_all_requests raises."""
    pairs = (("k_descale", k_descale, k), ("v_descale", v_descale, v))
    k_descale, v_descale = (for_all_requests(name, scale) if x.element_size() == 1 else None for name, scale, x in pairs)
    return k_descale, v_descale


def in_callers_words(error: CuteKernelsError, others: dict[str, Any], **names: str) -> CuteKernelsError:
    """Returns the error with the names that the call used.

    others: the arguments that the call gave by other names. names: the caller's names in addition to NAMES.
    """
    given = {own: alias for alias, own in ALIASES.items() if others.get(alias) is not None}
    table, sinks = given.get("page_table", "page_table"), given.get("s_aux", "s_aux")
    return renamed(error, {**NAMES, **names, **given, "page_table.table": table, "sinks": sinks})
