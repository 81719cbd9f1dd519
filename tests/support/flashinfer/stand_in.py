"""A module named flashinfer for FlashInfer's test files, with our wrappers or the reference in place of its attention."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from cute_kernels.integrations import flashinfer

from . import reference, wrappers

MODULES = (
    "flashinfer",
    "flashinfer.cascade",
    "flashinfer.decode",
    "flashinfer.fp4_quantization",
    "flashinfer.page",
    "flashinfer.prefill",
    "flashinfer.utils",
    "flashinfer.jit",
    "flashinfer.jit.utils",
    "flashinfer.jit.attention",
    "flashinfer.jit.attention.variants",
    "flashinfer.quantization",
    "flashinfer.quantization.nvfp4_quantization_utils",
)
HOMES = ("flashinfer", "flashinfer.cascade", "flashinfer.decode", "flashinfer.page", "flashinfer.prefill")
ASSIGNED = (*flashinfer.__all__, "BatchAttentionWithAttentionSinkWrapper")
SHORT_NAMES = {torch.float16: "f16", torch.bfloat16: "bf16", torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


class StandIn(ModuleType):
    """A module in which every other name exists too, and fails when it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def fail(*_args: Any, **_kwargs: Any) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} has no stand-in")

        return type(name, (), {"__init__": fail})  # a class: annotations may say `name | None`


def device_capability(_device: Any = None) -> tuple[int, int]:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (9, 0)


def put_in_place() -> None:
    """Makes `import flashinfer` give the stand-in in this process, whether or not FlashInfer is installed."""
    modules = {name: StandIn(name) for name in MODULES}
    for name, module in modules.items():
        module.__path__ = []  # a package: its submodules may be imported
        above, _, last = name.rpartition(".")
        if above:
            setattr(modules[above], last, module)
    modules["flashinfer.utils"].__dict__.update(
        has_flashinfer_jit_cache=lambda: True,  # nothing to warm up
        get_compute_capability=device_capability,
        is_sm90a_supported=lambda _device: device_capability() == (9, 0),
        get_alibi_slopes=flashinfer.get_alibi_slopes,
    )
    modules["flashinfer.jit.utils"].__dict__.update(filename_safe_dtype_map=SHORT_NAMES)
    modules["flashinfer.jit.attention.variants"].__dict__.update(attention_sink_decl={"fa2": "", "fa3": ""})
    sys.modules.update(modules)
    if importlib.util.find_spec("einops") is None:
        sys.modules["einops"] = ModuleType("einops")
        sys.modules["einops"].__dict__.update(repeat=repeat_sinks)


def repeat_sinks(sinks: Tensor, pattern: str, b: int, m: int) -> Tensor:
    """The one use of einops in FlashInfer's tests of sinks."""
    assert pattern == "h -> b h m 1"
    return sinks[None, :, None, None].expand(b, -1, m, 1)


def assign(references: frozenset[str]) -> None:
    """Sets each name to the package's object, or to the reference's for names that a test compares with."""
    for name in ASSIGNED:
        target = getattr(reference, name) if name in references else getattr(wrappers, name, getattr(flashinfer, name, None))
        if name.startswith("single") and name not in references and hasattr(reference, name):
            target = ours_where_modified(target, getattr(reference, name))
        for module in HOMES:
            setattr(sys.modules[module], name, target)


def ours_where_modified(ours: Callable[..., Any], theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Sends single calls with a window, cap, bias or scales to ours; other calls go to the reference, as the value to compare."""

    def call(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        windowed = options.get("window_left", -1) >= 0
        scaled = options.get("k_scale") is not None or options.get("v_scale") is not None
        modified = windowed or scaled or options.get("logits_soft_cap") or options.get("pos_encoding_mode", "NONE") != "NONE"
        return (ours if modified else theirs)(q, k, v, **options)

    return call
