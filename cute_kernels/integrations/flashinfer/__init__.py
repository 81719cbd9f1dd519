"""FlashInfer's classes and functions over the plans of this package: `import cute_kernels.integrations.flashinfer as flashinfer`.

Arguments have FlashInfer's names, order and defaults, and an lse is to base 2. An argument that asks for something the plans do
not do raises Unsupported, which names it. docs/engines.md has the table.
"""

from .cascade import MultiLevelCascadeAttentionWrapper, merge_state, merge_state_in_place, merge_states
from .decode import BatchDecodeWithPagedKVCacheWrapper, CUDAGraphBatchDecodeWithPagedKVCacheWrapper, fast_decode_plan
from .page import append_paged_kv_cache, get_batch_indices_positions, get_seq_lens
from .prefill import BatchPrefillWithPagedKVCacheWrapper
from .ragged import BatchPrefillWithRaggedKVCacheWrapper
from .single import single_decode_with_kv_cache, single_prefill_with_kv_cache, single_prefill_with_kv_cache_return_lse
from .slopes import get_alibi_slopes

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "append_paged_kv_cache",
    "fast_decode_plan",
    "get_alibi_slopes",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "single_prefill_with_kv_cache_return_lse",
]
