"""A stand-in for the FlashAttention-3 extension that vLLM builds: operators with its schemas, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

FWD = (  # of vLLM 0.26.0's extension
    "fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
    "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, "
    "Tensor? seqlens_rotary, "
    "Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, "
    "int window_size_right, float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, "
    "bool? pack_gqa, int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)
SCHEDULE = (
    "get_scheduler_metadata(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, int headdim, "
    "int headdim_v, ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, "
    "Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal, "
    "int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, int sm_margin) -> Tensor"
)


@contextmanager
def extension(
    monkeypatch: pytest.MonkeyPatch, folder: Path, fwd: Callable[..., object], schedule: Callable[..., object]
) -> Iterator[None]:
    """Sets FA3_SO to an extension in `folder` whose operators call `fwd` and `schedule`; removes the operators afterwards."""
    library = torch.library.Library("_vllm_fa3_C", "DEF")
    try:
        for schema, function in ((FWD, fwd), (SCHEDULE, schedule)):
            library.define(schema)
            library.impl(schema.split("(")[0], function, "CPU")
        (folder / "fa3.so").write_bytes(b"an extension")
        monkeypatch.setenv("FA3_SO", str(folder / "fa3.so"))
        monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
        yield
    finally:
        library._destroy()
