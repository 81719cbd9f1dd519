"""A step of vLLM, the same for every layer: its rows, keys and pages, in tensors on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...api.plan_cache import EXACT_ROWS, LONG_CHUNK, rounded_rows
from ...errors import Unsupported

REFUSED = {
    "mm_req_doc_ranges": "tokens that see later ones, of a prompt with images",
    "rswa_prefix_lens": "a sliding window that always sees a request's prompt",
}


@dataclass
class Step:
    """The metadata that layers share, under vLLM's names: vLLM derives subclasses, which set the fields.

    query_start_loc: int32 [num_reqs + 1]; seq_lens: int32 [num_reqs]; block_table: int32 [num_reqs, max_blocks]; slot_mapping:
    int64 [tokens], -1 for a token that is not stored. A request that pads the batch has no query rows, or no keys.
    max_query_len: the bound that a plan is made for, at least the batch's. max_seq_len: no plan depends on it, since vLLM
    captures a graph with another value than it warms up with, and nothing compiles in a capture. one_each: whether row i of q is
    the only row of request i.
    """

    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool
    one_each: bool


def step_of(batch: Any) -> Step:
    """The step that vLLM's CommonAttentionMetadata describes. Reads nothing from the device.

    Raises Unsupported for masks that are not served.
    """
    refused = [f"{name}: {what}, is not served" for name, what in REFUSED.items() if getattr(batch, name, None) is not None]
    if isinstance(batch.causal, Tensor):
        refused.append("causal = a tensor: requests of one batch that differ in it are not served")
    if refused:
        raise Unsupported(refused)
    requests, rows = batch.num_reqs, batch.max_query_len
    return Step(
        num_actual_tokens=batch.num_actual_tokens,
        max_query_len=rows if rows <= EXACT_ROWS else max(LONG_CHUNK, rounded_rows(rows)),
        max_seq_len=batch.max_seq_len,
        query_start_loc=batch.query_start_loc[: requests + 1],
        seq_lens=batch.seq_lens[:requests],
        block_table=batch.block_table_tensor[:requests],
        slot_mapping=batch.slot_mapping,
        causal=batch.causal,
        one_each=rows == 1 and batch.num_actual_tokens == requests,
    )
