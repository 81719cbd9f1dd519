"""FlashInfer's append to a paged cache, through KVAppendPlan, and its functions that read page tables on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...api.functional import append_kv
from ...append.descriptor import APPEND_DTYPES
from ...checks.tensors import check_shape, check_tensors
from ...errors import InvalidArgument, InvalidProblem, Unsupported
from .. import with_unit_last_stride
from .arguments import layout_named
from .caches import Cache, PagedCaches

CONVERTED = (torch.float8_e4m3fn, torch.float8_e5m2)  # the types that 16-bit values are rounded to without a scale


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

    append_key, append_value: [tokens, num_kv_heads, head_dim]; token i goes to position positions[i] of request batch_indices[i],
    both integers [tokens]; a negative batch index skips its token. Keys and values of the caches' type, of 16 or 8 bits, are
    copied bit by bit; f16 or bf16 for caches of e4m3 or e5m2 are rounded. paged_kv_cache, kv_indices, kv_indptr and
    kv_last_page_len: as a batch wrapper takes them, with room for the new tokens; kv_last_page_len is not read. Several PyTorch
    operations compute the slots: an engine can compute them once per step and give them to cute_kernels.append_kv in every layer.

    Raises InvalidProblem and InvalidArgument for caches, keys or values that break a rule, and what append_kv raises.
    """
    layout = layout_named(kv_layout).order
    k_cache, v_cache = PagedCaches(kv_layout)(paged_kv_cache)
    check_tensors(append_key=append_key, append_value=append_value, batch_indices=batch_indices, positions=positions)
    check_shape("append_key", append_key, (None, None, None), "[tokens, num_kv_heads, head_dim]")
    check_shape("append_value", append_value, tuple(append_key.shape), "append_key's")
    for name, tensor in (("batch_indices", batch_indices), ("positions", positions)):
        check_shape(name, tensor, (append_key.shape[0],), "[tokens]")
    _check_types(append_key, append_value, k_cache, v_cache)
    if not kv_indices.numel():
        return  # no request has a page
    page_size = k_cache.shape[1 if layout == "NHD" else 2]
    append_key, append_value = with_unit_last_stride(append_key), with_unit_last_stride(append_value)
    if append_key.element_size() == 1:  # a 16-bit append does not convert either
        append_key, append_value = _as_pairs("append_key", append_key), _as_pairs("append_value", append_value)
        k_cache, v_cache = _as_pairs("K of paged_kv_cache", k_cache), _as_pairs("V of paged_kv_cache", v_cache)
    kept = batch_indices >= 0
    page = kv_indptr[batch_indices.clamp(min=0)].long() + positions // page_size
    slots = kv_indices[torch.where(kept, page, 0)].long() * page_size + positions % page_size
    append_kv(append_key, append_value, k_cache, v_cache, torch.where(kept, slots, -1), layout=layout)


def _check_types(key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Raises InvalidArgument unless K and V are both copied bit by bit or rounded to 8 bits, with types that go together."""
    for name, new, cache in (("append_key", key, k_cache), ("append_value", value, v_cache)):
        copied = new.dtype == cache.dtype and (new.dtype in APPEND_DTYPES or new.element_size() == 1)
        rounded = new.dtype in APPEND_DTYPES and cache.dtype in CONVERTED
        if not copied and not rounded:
            rule = "must be the caches' type, of 16 or 8 bits, or f16 or bf16 beside e4m3 or e5m2"
            raise InvalidArgument(name, f"has dtype {new.dtype} beside a cache of {cache.dtype}, {rule}")
    both_8_bit = key.element_size() == value.element_size() == 1
    if value.dtype != key.dtype and not both_8_bit:
        raise InvalidArgument("append_value", f"has dtype {value.dtype}, must be append_key's, {key.dtype}")


def _as_pairs(name: str, x: Tensor) -> Tensor:
    """Returns a view of 8-bit elements as half as many f16. Raises Unsupported if the elements do not lie in aligned pairs."""
    odd = x.shape[-1] % 2 or x.storage_offset() % 2 or any(stride % 2 for stride in x.stride()[:-1])
    if odd or x.stride(-1) != 1:
        rule = "8-bit values are copied two at a time: head_dim, the offset and all strides must be even, and the last stride 1"
        raise Unsupported([f"{name} with shape {list(x.shape)}, strides {x.stride()}, offset {x.storage_offset()}: {rule}"])
    return x.view(torch.float16)


def get_batch_indices_positions(
    append_indptr: Tensor, seq_lens: Tensor, nnz: int, batch_indices: Tensor | None = None, positions: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Each new token's request and its position there, int32 [nnz] both; request -1 and position 0 past the last token.

    append_indptr: int32 [batch + 1]; request b has the new tokens append_indptr[b] : append_indptr[b + 1], which are its last.
    seq_lens: int32 [batch], which count the new tokens. batch_indices, positions: outputs, new tensors if None. Raises
    InvalidProblem for an output of another shape, and for tokens if there is no request.
    """
    for name, given in (("batch_indices", batch_indices), ("positions", positions)):
        if given is not None and given.shape != (nnz,):
            raise InvalidProblem(f"{name}.shape", tuple(given.shape), f"must be [nnz = {nnz}]")
    if nnz and not len(seq_lens):
        raise InvalidProblem("nnz", nnz, "must be 0 where append_indptr and seq_lens have no request")
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
    """The tokens of each request, [batch], from kv_indptr [batch + 1] and kv_last_page_len [batch]."""
    return (kv_indptr.diff() - 1).clamp(min=0) * page_size + kv_last_page_len
