"""Decode attention for Hopper in the CuTe Python DSL, behind one descriptor/plan interface.

Names load on first use: importing the package needs neither a GPU nor the compiler.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .append import KVAppendPlan
    from .append_descriptor import KVAppendDescriptor
    from .attention import decode_attention
    from .config import DecodeConfig, KernelSpec
    from .descriptors import FlashDecodingDescriptor, KVDtype, KVLayout, PagedDecodeDescriptor
    from .dispatch import DeviceFacts, Explanation, PlanPreference
    from .errors import (
        CompileFailed,
        CuteKernelsError,
        InvalidArgument,
        InvalidPlanTable,
        InvalidProblem,
        LaunchFailed,
        MisalignedOperand,
        MissingDependency,
        Unsupported,
        WorkspaceTooSmall,
    )
    from .faults import Fault
    from .functional import append_kv, merge_states
    from .kv_scale import KVScale
    from .merge import MergeStatesDescriptor, MergeStatesPlan
    from .page_table import PageTable
    from .plan import FlashDecodingPlan, PagedDecodePlan, PrecisionGuarantee, Sku
    from .quantize import quantize_kv
    from .rotary import Rotary, apply_rotary
    from .workspace import WorkspaceRegion

__version__ = "0.1.0"
__all__ = [
    "CompileFailed",
    "CuteKernelsError",
    "DecodeConfig",
    "DeviceFacts",
    "Explanation",
    "Fault",
    "FlashDecodingDescriptor",
    "FlashDecodingPlan",
    "InvalidArgument",
    "InvalidPlanTable",
    "InvalidProblem",
    "KVAppendDescriptor",
    "KVAppendPlan",
    "KVDtype",
    "KVLayout",
    "KVScale",
    "KernelSpec",
    "LaunchFailed",
    "MergeStatesDescriptor",
    "MergeStatesPlan",
    "MisalignedOperand",
    "MissingDependency",
    "PageTable",
    "PagedDecodeDescriptor",
    "PagedDecodePlan",
    "PlanPreference",
    "PrecisionGuarantee",
    "Rotary",
    "Sku",
    "Unsupported",
    "WorkspaceRegion",
    "WorkspaceTooSmall",
    "append_kv",
    "apply_rotary",
    "decode_attention",
    "merge_states",
    "quantize_kv",
]

_HOMES = {
    "append": ("KVAppendPlan",),
    "append_descriptor": ("KVAppendDescriptor",),
    "attention": ("decode_attention",),
    "config": ("DecodeConfig", "KernelSpec"),
    "descriptors": ("FlashDecodingDescriptor", "KVDtype", "KVLayout", "PagedDecodeDescriptor"),
    "dispatch": ("DeviceFacts", "Explanation", "PlanPreference"),
    "faults": ("Fault",),
    "functional": ("append_kv", "merge_states"),
    "kv_scale": ("KVScale",),
    "merge": ("MergeStatesDescriptor", "MergeStatesPlan"),
    "page_table": ("PageTable",),
    "plan": ("FlashDecodingPlan", "PagedDecodePlan", "PrecisionGuarantee", "Sku"),
    "quantize": ("quantize_kv",),
    "rotary": ("Rotary", "apply_rotary"),
    "workspace": ("WorkspaceRegion",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME.get(name, 'errors')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
