"""FlashInfer's append to a paged cache, through KVAppendPlan, and what it computes of page tables on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...api.functional import append_kv
from ...errors import InvalidProblem
from .arguments import layout_named
from .caches import Cache, PagedCaches


def append_paged_kv_cache(
    append_key: Tensor,
    append_value: Tensor,
    batch_indices: Tensor,
    positions: Tensor,
    paged_kv_cache: Cache,
    kv_indices: Tensor,
    kv_indptr: Tensor,
    kv_last_page_len: Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Stores K and V of new tokens in the pages of their requests; nothing is read back from the device.

    append_key, append_value: [tokens, num_kv_heads, head_dim], f16 or bf16, which go to place positions[i] of request
    batch_indices[i], both integers [tokens]; a negative batch index skips its token. paged_kv_cache, kv_indices, kv_indptr and
    kv_last_page_len: as a batch wrapper takes them, with room for the new tokens; the last is not read. The slots are computed by
    several operations of PyTorch: an engine computes them once a step and gives them to cute_kernels.append_kv in every layer.

    Raises InvalidProblem and InvalidArgument for caches, and what append_kv raises.
    """
    layout = layout_named(kv_layout).order
    k_cache, v_cache = PagedCaches(kv_layout)(paged_kv_cache)
    if not kv_indices.numel():
        return  # no request has a page
    page_size = k_cache.shape[1 if layout == "NHD" else 2]
    kept = batch_indices >= 0
    page = kv_indptr[batch_indices.clamp(min=0)].long() + positions // page_size
    slots = kv_indices[torch.where(kept, page, 0)].long() * page_size + positions % page_size
    append_kv(append_key, append_value, k_cache, v_cache, torch.where(kept, slots, -1), layout=layout)


def get_batch_indices_positions(
    append_indptr: Tensor, seq_lens: Tensor, nnz: int, batch_indices: Tensor | None = None, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each new token's request and its place there, int32 [nnz] both; request -1 and place 0 past the last token.

    append_indptr: int32 [batch + 1], request b has the new tokens append_indptr[b] : append_indptr[b + 1], which are its last.
    seq_lens: int32 [batch], with the new tokens. batch_indices, positions: what is written instead of new tensors. Raises
    InvalidProblem for those of another shape.
    """
    for name, given in (("batch_indices", batch_indices), ("positions", positions)):
        if given is not None and given.shape != (nnz,):
            raise InvalidProblem(f"{name}.shape", tuple(given.shape), f"must be [nnz = {nnz}]")
    tokens = torch.arange(nnz, dtype=append_indptr.dtype, device=append_indptr.device)
    request = torch.searchsorted(append_indptr, tokens, right=True) - 1
    mine = request < len(seq_lens)
    request = torch.where(mine, request, -1)
    place = torch.where(mine, seq_lens[request] - append_indptr[1:][request] + tokens, 0)
    if batch_indices is None:
        batch_indices = torch.empty(nnz, dtype=torch.int32, device=append_indptr.device)
    if positions is None:
        positions = torch.empty(nnz, dtype=torch.int32, device=append_indptr.device)
    return batch_indices.copy_(request), positions.copy_(place)


def get_seq_lens(kv_indptr: Tensor, kv_last_page_len: Tensor, page_size: int) -> Tensor:
    """The tokens of each request, [batch]: of kv_indptr [batch + 1] and kv_last_page_len [batch]."""
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len
