"""Which short rows a plan serves by CTAs that take two KV heads of several query rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cute_kernels as ck
from cute_kernels.attention.choice.heuristics import choose
from cute_kernels.attention.kernel_spec import kernel_spec
from cute_kernels.config.limits import supports


@pytest.mark.parametrize(
    ("heads", "changes"),
    [
        (2, {}),
        (2, {"batch_size": 96}),
        (2, {"max_seq_len": 256}),
        (1, {"batch_size": 48}),  # three requests of one head a CTA, or two of two
        (1, {"batch_size": 33}),  # one of two heads
        (1, {"max_seq_len": 2048}),
        (1, {"max_seq_len": None}),
        (1, {"max_q_len": 4}),  # one m-tile
        (1, {"num_heads": 4, "num_kv_heads": 1}),
        (1, {"v_scale": ck.KVScale.HEAD}),
        (1, {"kv_dtype": ck.KVDtype.E4M3, "k_scale": ck.KVScale.NONE, "v_scale": ck.KVScale.NONE}),
    ],
)
def test_two_kv_heads_of_several_query_rows(heads: int, changes: dict[str, Any]) -> None:
    """Short rows with scales of tokens, of which a CTA takes whole ones: on 132 SMs there are 16 CTAs for a head, 33 for two."""
    stored = {"kv_dtype": ck.KVDtype.INT8, "k_scale": ck.KVScale.TOKEN_F16, "v_scale": ck.KVScale.TOKEN_F16}
    shape = {"batch_size": 64, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "q_dtype": torch.bfloat16}
    described = ck.PagedAttentionDescriptor(**{**shape, **stored, "max_q_len": 8, "max_seq_len": 1024, **changes}).problem
    config = choose(described, "sm90", "sm_90a", 132)
    assert config.unit_heads == heads
    assert supports(kernel_spec(described, "sm90", "sm_90a", config, partition="balanced")) == []
