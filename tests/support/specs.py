"""A spec of a decode kernel, for tests that need one and no problem."""

from __future__ import annotations

from typing import Any

from cute_kernels.config.decode import KernelSpec

USUAL: dict[str, Any] = {
    "arch": "sm90",
    "target": "sm_90a",
    "source": "paged",
    "table_format": "dense",
    "element_type": "bf16",
    "k_type": "bf16",
    "v_type": "bf16",
    "k_scale": "none",
    "v_scale": "none",
    "head_dim": 128,
    "v_head_dim": 128,
    "group_size": 4,
    "page_size": 16,
    "vector_bytes": 16,
    "lse_base": "e",
    "tile_n": 32,
    "num_stages": 8,
    "num_warps": 4,
    "partition": "balanced",
}


def usual_spec(**changes: Any) -> KernelSpec:
    """The spec of decode in bf16 over pages of 16, with `changes`."""
    return KernelSpec(**{**USUAL, **changes})
