"""register(): makes CUTE_KERNELS an attention backend of vLLM. It imports no kernel code, since every vLLM process runs it."""

from __future__ import annotations

from typing import Any

from ...errors import CuteKernelsError
from ..engine import Call, Engine, tell_once

NAME = "CUTE_KERNELS"
PATH = "cute_kernels.integrations.vllm.backend.CuteKernelsBackend"
REGISTRY = "v1.attention.backends.registry"
CALLS = (Call(REGISTRY, "AttentionBackendEnum", ()), Call(REGISTRY, "register_backend", ("backend", "class_path")))
ENGINE = Engine("vllm", "0.26.0 and 0.33.0", CALLS)


def plugin() -> None:
    """The entry point of vLLM's general plugins. For a vLLM whose calls have changed, it only writes one line to the log.

    Every process of vLLM runs this, also a process that asks for another backend, so it raises nothing.
    """
    try:
        register()
    except Exception as error:
        raised = f"raised {type(error).__name__}: {error}"
        why = error if isinstance(error, CuteKernelsError) else ENGINE.moved(f"{REGISTRY}.register_backend", raised)
        tell_once(f"cute_kernels: {why}: there is no attention backend {NAME}")


def register() -> Any:
    """Makes CUTE_KERNELS a member of vLLM's AttentionBackendEnum, once, and returns it; `--attention-backend` takes the name.

    vLLM calls it in each of its processes, by the entry point. Raises MissingDependency without vLLM, and Unsupported for a
    version whose calls have changed, naming the call.
    """
    ENGINE.check_calls()
    registry = ENGINE.part(REGISTRY)
    backends = registry.AttentionBackendEnum
    if NAME in backends.__members__:
        return backends.__members__[NAME]
    if hasattr(backends, "register"):  # vLLM 0.33: a name makes a member
        registry.register_backend(NAME, PATH)
        member = backends.__members__[NAME]
    else:
        member = _new_member(backends)
        registry.register_backend(member, PATH)
    member.__reduce_ex__ = lambda protocol: (register, ())  # a config is unpickled before its process has loaded plugins
    return member


def _new_member(backends: Any) -> Any:
    """Adds a member to an existing Enum: vLLM 0.26 registers members only, and looks up a backend by its name."""
    member = object.__new__(backends)
    member._name_, member._value_ = NAME, PATH
    if not all(isinstance(getattr(backends, kept, None), dict) for kept in ("_member_map_", "_value2member_map_")):
        raise ENGINE.moved(f"{REGISTRY}.AttentionBackendEnum", "is no Enum")
    setattr(backends, NAME, member)
    backends._member_map_[NAME] = backends._value2member_map_[PATH] = member
    backends._member_names_.append(NAME)
    return member
