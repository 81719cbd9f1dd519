"""flash-attention's functions for inference over the plans of this package: the same names, arguments and results.

docs/engines.md lists what is served, what raises, and the calls side by side.
"""

from .kvcache import flash_attn_with_kvcache, get_scheduler_metadata
from .packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from .varlen import flash_attn_func, flash_attn_varlen_func

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]
