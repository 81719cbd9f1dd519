"""A head of V may be narrower than K's in a kernel's spec: the seam for models whose values are. No plan makes one yet."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cute_kernels.config.limits import supports
from cute_kernels.config.modifiers import Modifiers
from cute_kernels.device.tracing.decode import build
from tests.support import machine_code
from tests.support.specs import usual_spec

NARROW = {"head_dim": 192, "v_head_dim": 128}
CAUSAL = {"query": "ragged", "modifiers": Modifiers(causal="bottom_right")}
TILES = {"tile_n": 64, "num_stages": 2, "num_warps": 8, "mma": "warpgroup", "block_rows": 128}
SPECS: dict[str, dict[str, Any]] = {
    "warps": {"num_stages": 4},
    "cp_async": {"arch": "sm80", "target": "sm_80", "tile_n": 16, "num_warps": 2, "num_stages": 4, "partition": "whole"},
    "8 bits": {"k_type": "e4m3", "v_type": "e4m3"},
    "long queries": {**CAUSAL, **TILES, "partition": "dealt", "many_blocks": True},
}


@pytest.mark.parametrize("name", SPECS)
def test_v_may_be_narrower_than_k(name: str, tmp_path: Path) -> None:
    """It compiles, and the shared memory, the workspace's words and the products of V count V's own columns."""
    spec = usual_spec(**NARROW, **SPECS[name])
    assert supports(spec) == []
    wide = replace(spec, v_head_dim=192)
    assert spec.row_words * spec.word_columns == 128 and wide.row_words * wide.word_columns == 192
    assert spec.tile_bytes == spec.tile_n * (192 * spec.k_bytes + 128 * spec.v_bytes)
    assert spec.smem_bytes < wide.smem_bytes
    ptx, _ = machine_code.dump(build, spec, tmp_path)
    if spec.by_warpgroup:
        steps = re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16", ptx)
        assert sorted(set(steps)) == ["128", "64"], "P V of 128 columns, Q K^T of 64 tokens"
        assert steps.count("64") == 192 // 16 and steps.count("128") == 2 * 64 // 16


def test_v_may_not_be_wider_than_k() -> None:
    """The output goes through the rows of the query."""
    assert supports(usual_spec(head_dim=128, v_head_dim=192)) == [
        "v_head_dim=192 is outside 1..head_dim=128: out goes through the query's rows"
    ]
