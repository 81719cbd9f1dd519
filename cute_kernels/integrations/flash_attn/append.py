"""New tokens of a call: they are stored after each request's last token; a rotary embedding first rotates them, and q."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...api.functional import append_kv
from ...append.descriptor import APPEND_DTYPES
from ...checks.tensors import check_tensor, check_tensors
from ...errors import InvalidArgument, InvalidProblem, Unsupported
from ...kv.page_table import PageTable
from ...kv.rotary import Rotary, apply_rotary
from .. import with_unit_last_stride
from .cache import Cache

SKIPPED = -1  # the slot of a token that is not stored


class RotaryTables(NamedTuple):
    """cos_sin f32 [max_position, rotary_dim], the cosines first; starts int32 [batch]: each request's first new position."""

    cos_sin: Tensor
    starts: Tensor
    interleaved: bool

    @property
    def rotary(self) -> Rotary:
        return Rotary("interleaved" if self.interleaved else "half", self.cos_sin.shape[1])


class Tokens(NamedTuple):
    """Tokens of all requests, one after another.

    requests: int64 [tokens], each token's request; `batch` for one past the last request. places: [tokens], its index there.
    """

    requests: Tensor
    places: Tensor

    def after(self, starts: Tensor) -> Tensor:
        """int64 [tokens]: the position of each token, if its request's first token stands at starts[request]."""
        return starts[self.requests.clamp(max=len(starts) - 1)].long() + self.places


class New(NamedTuple):
    """K and V of new tokens: [batch, seqlen_new, num_kv_heads, head_dim], or [total, num_kv_heads, head_dim] with cu_seqlens."""

    k: Tensor
    v: Tensor
    cu_seqlens: Tensor | None


def append(
    cache: Cache,
    new: New,
    scales: tuple[Tensor | None, Tensor | None],
    tables: RotaryTables | None,
    q: Tensor,
    cu_seqlens_q: Tensor | None,
    q_in_order: bool,
) -> tuple[Cache, Tensor]:
    """Stores the new tokens at the ends of their requests; returns (the cache with lengths that count them, the rotated q).

    tables: None for no rotary embedding. q_in_order: whether each query row stands at a position of its own; if not, all rows of
    a request stand at the position of its first new token. Nothing synchronises. Raises what append_kv raises.
    """
    starts = cache.lengths
    if starts is None:
        raise InvalidArgument("cache_seqlens", "is None, must be given beside k: new tokens are stored behind so many")
    batch = len(starts)
    _check_new(new, batch)
    k, v = (with_unit_last_stride(x.flatten(0, 1) if new.cu_seqlens is None else x) for x in (new.k, new.v))
    lengths = starts + (new.k.shape[1] if new.cu_seqlens is None else new.cu_seqlens.diff())
    one_each = new.cu_seqlens is None and new.k.shape[1] == 1
    if not one_each:
        lengths = lengths.masked_fill_(starts < 0, 0)  # a padded request stays without keys
    grown = cache._replace(lengths=lengths)
    if not batch or not len(k):
        return grown, q if tables is None else rotated(q, cu_seqlens_q, tables, q_in_order)
    tokens = None if one_each and tables is None else tokens_of(new.k, new.cu_seqlens)
    slots: Tensor | PageTable = PageTable.dense(cache.pages(batch), lengths)
    if not one_each:
        assert tokens is not None
        slots = _slots(cache, tokens, tokens.after(starts), batch)
    k_scale, v_scale = scales
    if tables is None or tokens is None:
        append_kv(k, v, cache.k, cache.v, slots, k_scale=k_scale, v_scale=v_scale, layout="NHD")
        return grown, q
    together = cu_seqlens_q is None and new.cu_seqlens is None and q.shape[1] == new.k.shape[1] and (q_in_order or one_each)
    # fmt: off
    q_out = append_kv(
        k, v, cache.k, cache.v, slots, k_scale=k_scale, v_scale=v_scale, layout="NHD", q=q.flatten(0, 1) if together else None,
        cos_sin_cache=tables.cos_sin, positions=tokens.after(tables.starts), pairing=tables.rotary.pairing,
    )
    # fmt: on
    return grown, rotated(q, cu_seqlens_q, tables, q_in_order) if q_out is None else q_out.view(q.shape)


def rotary_tables(
    rotary_cos: Tensor, rotary_sin: Tensor, starts: Tensor | None, interleaved: bool, device: torch.device
) -> RotaryTables:
    """flash-attention's two tables, [max_position, rotary_dim / 2] each, as one. Raises InvalidArgument, InvalidProblem."""
    check_tensors(rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    if rotary_cos.dim() != 2 or rotary_cos.shape != rotary_sin.shape:
        shapes = (tuple(rotary_cos.shape), tuple(rotary_sin.shape))
        raise InvalidProblem("(rotary_cos.shape, rotary_sin.shape)", shapes, "must both be [max_position, rotary_dim / 2]")
    check_tensor(device, "rotary_seqlens", starts, torch.int32)
    assert starts is not None
    return RotaryTables(torch.cat([rotary_cos, rotary_sin], 1).float(), starts, interleaved)


def rotated(q: Tensor, cu_seqlens_q: Tensor | None, tables: RotaryTables, in_order: bool) -> Tensor:
    """q with each row rotated by its own position (in_order), or by the position of its request's first new token."""
    if not q.numel():
        return q
    tokens = tokens_of(q, cu_seqlens_q)
    positions = (tokens if in_order else tokens._replace(places=torch.zeros_like(tokens.places))).after(tables.starts)
    rows = q.flatten(0, 1) if cu_seqlens_q is None else q
    return apply_rotary(rows, tables.cos_sin, positions, tables.rotary).view(q.shape)


def tokens_of(x: Tensor, cu_seqlens: Tensor | None) -> Tokens:
    """The tokens of x, [batch, tokens, heads, head_dim], or [total, heads, head_dim] with cu_seqlens int32 [batch + 1]."""
    if cu_seqlens is None:
        ids = torch.arange(x.shape[0] * x.shape[1], device=x.device)
        return Tokens(ids // x.shape[1], ids % x.shape[1])
    ids = torch.arange(x.shape[0], dtype=cu_seqlens.dtype, device=x.device)
    requests = torch.searchsorted(cu_seqlens[1:], ids, right=True)
    return Tokens(requests, ids - cu_seqlens[requests])


def _slots(cache: Cache, tokens: Tokens, positions: Tensor, batch: int) -> Tensor:
    """Returns the slot of each token at its position, int64 [tokens]; SKIPPED for tokens of a request that starts below 0.

    A token past its request's room gets a slot past the cache's end: an append records it as a fault.
    """
    page_size, pages = cache.k.shape[1], cache.pages(batch)
    columns = (positions // page_size).clamp(0, max(0, pages.shape[1] - 1))
    page = pages[tokens.requests.clamp(max=batch - 1), columns].long()
    slots = torch.where(positions < cache.room, page * page_size + positions % page_size, cache.k.shape[0] * page_size)
    return slots.masked_fill_((tokens.requests >= batch) | (positions < tokens.places) | (page < 0), SKIPPED)


def _check_new(new: New, batch: int) -> None:
    check_tensors(k=new.k, v=new.v)
    axes = 4 if new.cu_seqlens is None else 3
    wanted = (
        "[batch, seqlen_new, num_kv_heads, head_dim]" if axes == 4 else "[total, num_kv_heads, head_dim] beside cu_seqlens_k_new"
    )
    for name, tensor in (("k", new.k), ("v", new.v)):
        if tensor.dim() != axes or (axes == 4 and tensor.shape[0] != batch):
            raise InvalidProblem(f"{name}.shape", tuple(tensor.shape), f"must be {wanted}, batch = {batch}")
        if tensor.dtype not in APPEND_DTYPES:
            raise Unsupported([f"{name}.dtype = {tensor.dtype}: must be {' or '.join(map(str, APPEND_DTYPES))}"])
    if new.cu_seqlens is not None:
        check_tensor(new.k.device, "cu_seqlens_k_new", new.cu_seqlens, torch.int32)
        if tuple(new.cu_seqlens.shape) != (batch + 1,):
            raise InvalidProblem("cu_seqlens_k_new.shape", tuple(new.cu_seqlens.shape), f"must be [batch + 1] = [{batch + 1}]")
