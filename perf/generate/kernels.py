"""The kernels that a run needs, several compiled at once before it; the run itself would compile them one by one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from cute_kernels.api.plan_cache import LONG_CHUNK, length_hint
from cute_kernels.append.descriptor import KVAppendDescriptor
from cute_kernels.append.variants import explain as explain_append
from cute_kernels.attention.attention_descriptor import PagedAttentionDescriptor
from cute_kernels.attention.variants import explain
from cute_kernels.compile.kernels import compile_ahead
from cute_kernels.kv.types import KVDtype, KVLayout
from cute_kernels.planning.variants import DeviceFacts, PlanPreference
from perf.generate.measure import PAGE, table_columns
from perf.generate.models import LLAMA_3_8B, Work

HEADS: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": LLAMA_3_8B["head_dim"], "q_dtype": torch.bfloat16}
NHD = KVLayout("NHD", 16)


def compile_for(work: Work, e4m3: bool, facts: DeviceFacts) -> int:
    """Compiles the kernels that generate_batch and generate need for such work; returns their number."""
    return compile_ahead(specs_for(work, e4m3, facts))


def specs_for(work: Work, e4m3: bool, facts: DeviceFacts) -> list[Any]:
    """The specs of these kernels, as far as they are known beforehand."""
    stores: list[KVDtype | None] = [None, KVDtype.E4M3] if e4m3 else [None]
    specs = [explain(d.problem, facts, PlanPreference()).chosen.spec for d in _attention(work, stores)]
    specs += [explain_append(d, facts, PlanPreference()).chosen.spec for d in _appends(work, stores)]
    return list(dict.fromkeys(specs))


def _attention(work: Work, stores: list[KVDtype | None]) -> Iterator[PagedAttentionDescriptor]:
    longest = length_hint(work.prompt_len + work.new_tokens)
    chunk: dict[str, Any] = {**HEADS, "max_q_len": LONG_CHUNK}
    yield PagedAttentionDescriptor(2, **chunk, page_size=None, table_format="packed", max_seq_len=work.prompt_len)
    for kv_dtype in stores:
        paged: dict[str, Any] = {"page_size": PAGE, "kv_dtype": kv_dtype, "layout": NHD, "max_seq_len": longest}
        yield PagedAttentionDescriptor(work.prompts, **chunk, **paged)
        step = {**paged, "max_seq_len": length_hint(table_columns(work) * PAGE)}
        for batch in _powers(work.prompts):
            yield PagedAttentionDescriptor(batch, **HEADS, **step, max_q_len=1, query_format="uniform")
    for rows in (1, work.prompt_len):  # query rows in generate
        lengths: dict[str, Any] = {"table_format": "lengths", "query_format": "uniform", "max_seq_len": longest}
        yield PagedAttentionDescriptor(work.prompts, **HEADS, **lengths, page_size=None, max_q_len=rows)


def _appends(work: Work, stores: list[KVDtype | None]) -> Iterator[KVAppendDescriptor]:
    shape: dict[str, Any] = {
        "num_kv_heads": 8,
        "head_dim": HEADS["head_dim"],
        "page_size": PAGE,
        "dtype": torch.bfloat16,
        "layout": NHD,
    }
    for kv_dtype in stores:
        for tokens in _powers(work.prompts):
            yield KVAppendDescriptor(tokens, **shape, kv_dtype=kv_dtype, table_format="dense", alignment_bytes=16)
        for tokens in (64, 512, 8192):
            yield KVAppendDescriptor(tokens, **shape, kv_dtype=kv_dtype, alignment_bytes=16)


def _powers(most: int) -> list[int]:
    return [1 << bits for bits in range(most.bit_length())]
