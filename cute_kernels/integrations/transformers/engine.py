"""The transformers that is installed: its version, the calls of it that are built upon, and whether they are still there."""

from __future__ import annotations

import inspect
import logging
from importlib import import_module
from typing import Any, NamedTuple

from ...errors import MissingDependency, Unsupported

TESTED = "5.17.0 and 5.23.0"

logger = logging.getLogger("cute_kernels")
_told: set[str] = set()


class Call(NamedTuple):
    """A function or a method of transformers that is built upon, and the parameters that it must take."""

    module: str
    name: str
    parameters: tuple[str, ...]


CALLS = (
    Call("modeling_utils", "AttentionInterface.register", ("key", "value")),
    Call("masking_utils", "AttentionMaskInterface.register", ("key", "value")),
    Call("masking_utils", "sdpa_mask", ("batch_size", "q_length", "kv_length", "q_offset", "kv_offset", "attention_mask")),
    Call("integrations.sdpa_attention", "sdpa_attention_forward", ("module", "query", "key", "value", "attention_mask")),
    Call("modeling_flash_attention_utils", "_lazy_imports", ("implementation",)),
    Call("modeling_utils", "PreTrainedModel._check_and_adjust_attn_implementation", ("attn_implementation",)),
    Call("generation.continuous_batching.continuous_api", "ContinuousBatchingManager.switch_to_cb_friendly_attn", ("model",)),
    Call("generation.continuous_batching.cache", "PagedAttentionCache.update", ("key_states", "value_states", "layer_idx")),
)


def part(module: str) -> Any:
    """A module of transformers. Raises MissingDependency without transformers, Unsupported where the module has moved."""
    try:
        return import_module(f"transformers.{module}")
    except ModuleNotFoundError as error:
        if error.name == "transformers":
            raise MissingDependency("transformers", f"pip install transformers; {TESTED} were tested") from error
        raise moved(f"transformers.{module}", f"cannot be imported: {error}") from error


def version() -> str:
    """The version of transformers that is installed."""
    return str(import_module("transformers").__version__)


def moved(call: str, what: str) -> Unsupported:
    """What is raised where transformers is not what this was written for: it names the version and the call."""
    return Unsupported([f"transformers {version()}: {call} {what}; {TESTED} were tested"])


def check_calls() -> None:
    """Raises Unsupported for the first of CALLS that is gone or takes other parameters."""
    for module, name, parameters in CALLS:
        found: Any = part(module)
        for attribute in name.split("."):
            found = getattr(found, attribute, None)
        if found is None:
            raise moved(f"{module}.{name}", "is not there")
        missing = [each for each in parameters if each not in inspect.signature(found).parameters]
        if missing:
            raise moved(f"{module}.{name}", f"takes no {', '.join(missing)}")


def tell_once(reason: str) -> None:
    """One line in the log for each reason."""
    if reason not in _told:
        _told.add(reason)
        logger.warning(reason)
