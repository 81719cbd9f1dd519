"""Decode attention for Hopper in the CuTe Python DSL, behind one descriptor/plan interface.

Names load on first use: importing the package needs neither a GPU nor the compiler.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api.attention import decode_attention, paged_attention
    from .api.functional import append_kv, attention_weights, merge_states
    from .append.descriptor import KVAppendDescriptor
    from .append.plan import KVAppendPlan
    from .attention.attention_descriptor import PagedAttentionDescriptor
    from .attention.attention_plan import PagedAttentionPlan
    from .attention.descriptors import FlashDecodingDescriptor, PagedDecodeDescriptor
    from .attention.plan import FlashDecodingPlan, PagedDecodePlan, PrecisionGuarantee, Sku
    from .backward.descriptor import PagedAttentionBackwardDescriptor
    from .backward.plan import AttentionGradients, PagedAttentionBackwardPlan
    from .config.decode import DecodeConfig, KernelSpec
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
    from .kv.faults import Fault
    from .kv.page_table import PageTable
    from .kv.quantize import quantize_kv
    from .kv.rotary import Rotary, apply_rotary
    from .kv.scale import KVScale
    from .kv.types import KVDtype, KVLayout
    from .merge.descriptor import MergeStatesDescriptor
    from .merge.plan import MergeStatesPlan
    from .planning.variants import DeviceFacts, Explanation, PlanPreference
    from .planning.workspace import WorkspaceRegion
    from .weights.descriptor import AttentionWeightsDescriptor
    from .weights.plan import AttentionWeights, AttentionWeightsPlan

__version__ = "0.1.0"
__all__ = [
    "AttentionGradients",
    "AttentionWeights",
    "AttentionWeightsDescriptor",
    "AttentionWeightsPlan",
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
    "PagedAttentionBackwardDescriptor",
    "PagedAttentionBackwardPlan",
    "PagedAttentionDescriptor",
    "PagedAttentionPlan",
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
    "attention_weights",
    "decode_attention",
    "fp8_attention",
    "merge_states",
    "paged_attention",
    "quantize_kv",
]

_HOMES = {
    "api.attention": ("decode_attention", "paged_attention"),
    "api.fp8": ("fp8_attention",),
    "api.functional": ("append_kv", "attention_weights", "merge_states"),
    "append.descriptor": ("KVAppendDescriptor",),
    "append.plan": ("KVAppendPlan",),
    "attention.attention_descriptor": ("PagedAttentionDescriptor",),
    "attention.attention_plan": ("PagedAttentionPlan",),
    "attention.descriptors": ("FlashDecodingDescriptor", "PagedDecodeDescriptor"),
    "attention.plan": ("FlashDecodingPlan", "PagedDecodePlan"),
    "backward.descriptor": ("PagedAttentionBackwardDescriptor",),
    "backward.plan": ("AttentionGradients", "PagedAttentionBackwardPlan"),
    "kv.faults": ("Fault",),
    "kv.page_table": ("PageTable",),
    "kv.quantize": ("quantize_kv",),
    "kv.rotary": ("Rotary", "apply_rotary"),
    "kv.scale": ("KVScale",),
    "kv.types": ("KVDtype", "KVLayout"),
    "merge.descriptor": ("MergeStatesDescriptor",),
    "merge.plan": ("MergeStatesPlan",),
    "planning.base": ("PrecisionGuarantee", "Sku"),
    "planning.variants": ("DeviceFacts", "Explanation", "PlanPreference"),
    "planning.workspace": ("WorkspaceRegion",),
    "weights.descriptor": ("AttentionWeightsDescriptor",),
    "weights.plan": ("AttentionWeights", "AttentionWeightsPlan"),
    "config.decode": ("DecodeConfig", "KernelSpec"),
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
