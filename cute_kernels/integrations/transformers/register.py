"""register(): makes "cute_kernels" an attention implementation of transformers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ...append.descriptor import APPEND_DTYPES
from ...errors import InvalidProblem, Unsupported
from ...kv.types import KVDtype
from ..flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from .continuous import KEPT, continuous_forward
from .engine import check_calls, moved, part, tell_once
from .fallback import take_own
from .forward import attention_forward
from .masks import lengths_mask
from .models import unserved

NAME = "cute_kernels"
PAGED_NAME = "cute_flash_3"  # continuous batching asks a name for "flash", and for a version of it, before it uses block tables
PREFIX = "paged|"


def register(kv_dtype: KVDtype | None = None) -> str:
    """Makes "cute_kernels" an attention implementation of the transformers that is installed; returns that name.

    `AutoModelForCausalLM.from_pretrained(..., attn_implementation="cute_kernels")`, or `model.set_attn_implementation`, then
    serves generate, with dynamic and static caches, and generate_batch. Call it before the model is made.

    kv_dtype: the type that generate_batch stores, in layers without a sliding window: KVDtype.E4M3 or E5M2, rounded without
    scales; by default the model's dtype. The last call of `register` decides. transformers' pages stay as large as they are: half
    the bytes are read, no more tokens fit.

    Raises MissingDependency without transformers, Unsupported for a version that lacks a call that is needed, naming the call,
    and InvalidProblem for another kv_dtype.

    In addition to what transformers lets one register, this wraps four of its functions: the one that checks names of
    implementations, the one that finds a flash-attention by its name, continuous batching's choice of an implementation, and
    the update of its cache.
    """
    if kv_dtype not in (None, KVDtype.E4M3, KVDtype.E5M2):
        raise InvalidProblem("kv_dtype", kv_dtype, "must be None, KVDtype.E4M3 or KVDtype.E5M2")
    check_calls()
    take_own()
    attention, masks = part("modeling_utils").AttentionInterface, part("masking_utils").AttentionMaskInterface
    attention.register(NAME, attention_forward)
    masks.register(NAME, lengths_mask)
    batches = torch.compiler.disable(functools.partial(continuous_forward, kv_dtype=kv_dtype and kv_dtype.torch_dtype))
    for name in (PAGED_NAME, PREFIX + PAGED_NAME):  # no mask is registered for them, so continuous batching makes none
        attention.register(name, batches)
    _wrap(part("modeling_flash_attention_utils"), "_lazy_imports", _finding)
    _wrap(part("modeling_utils").PreTrainedModel, "_check_and_adjust_attn_implementation", _checking)
    manager = part("generation.continuous_batching.continuous_api").ContinuousBatchingManager
    _wrap(manager, "switch_to_cb_friendly_attn", _switching)
    _wrap(part("generation.continuous_batching.cache").PagedAttentionCache, "update", _updating)
    return NAME


def _wrap(owner: Any, name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wraps a function of transformers by `around`, once."""
    original = getattr(owner, name)
    if getattr(original, "by_cute_kernels", False):
        return
    wrapped: Any = functools.wraps(original, updated=())(around(original))
    wrapped.by_cute_kernels = True
    setattr(owner, name, wrapped)


def _finding(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps _lazy_imports, which finds the functions of a flash-attention by its name."""

    def lazy_imports(implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        if not _is_paged(implementation):
            return original(implementation, *args, **kwargs)
        utils = part("modeling_flash_attention_utils")
        padding = (getattr(utils, "_pad_input", None), getattr(utils, "_unpad_input", None))
        return flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, *padding

    return lazy_imports


def _checking(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps _check_and_adjust_attn_implementation, which returns the implementation that a model gets for a name asked for."""

    def check(model: Any, attn_implementation: str | None, *args: Any, **kwargs: Any) -> Any:
        name = (attn_implementation or "").removeprefix(PREFIX)
        if name not in (NAME, PAGED_NAME):
            return original(model, attn_implementation, *args, **kwargs)
        why = unserved(model)
        if why is None:
            return attn_implementation
        tell_once(f"cute_kernels: {type(model).__name__} has {why}: it keeps transformers' own attention")
        return original(model, None, *args, **kwargs)

    return check


def _switching(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps switch_to_cb_friendly_attn, which sets the implementation that a model has during continuous batching."""

    def switch(manager: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        before = model.config._attn_implementation
        if before != NAME:
            return original(manager, model, *args, **kwargs)
        if model.dtype not in APPEND_DTYPES:
            raise Unsupported([f"generate_batch of a model in {model.dtype}: must be in {' or '.join(map(str, APPEND_DTYPES))}"])
        model.set_attn_implementation(PAGED_NAME)
        original(manager, model, *args, **kwargs)
        if not _is_paged(model.config._attn_implementation):
            found = model.config._attn_implementation
            raise moved("ContinuousBatchingManager.switch_to_cb_friendly_attn", f"takes {found} in place of {PAGED_NAME}")
        manager._original_attn_impl = before  # the model gets this name back when the manager stops
        return None

    return switch


def _updating(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps PagedAttentionCache.update: in 5.24 a layer calls it before attention, whose step then names no cache.

    Our attention stores K and V itself, so the wrapped function only writes the cache into the step. It also attaches the cache
    to K: a later layer may take K and V from this one, and then that layer calls no update.
    """

    def update(cache: Any, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        step = kwargs.get("kwargs")
        if step is None or "cache" in step or not _is_paged(cache.config._attn_implementation):
            return original(cache, key_states, value_states, layer_idx, *args, **kwargs)
        step["cache"] = cache
        setattr(key_states, KEPT, cache)
        return key_states, value_states

    return torch.compiler.disable(update)


def _is_paged(implementation: str | None) -> bool:
    """Whether a name is that of our attention in continuous batching."""
    return implementation is not None and implementation.removeprefix(PREFIX) == PAGED_NAME
