"""FlashInfer's arguments in the words of our descriptors; an argument without a counterpart raises Unsupported, naming it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...api.plan_cache import KV_DTYPES
from ...errors import InvalidArgument, InvalidProblem, Unsupported
from ...kv.types import KVLayout
from ...planning.variants import PlanPreference
from .. import refuse_tensor
from .slopes import get_alibi_slopes

MAX_HEAD_DIM = 256  # the limit of the variants on a GPU
LAYOUTS = {"HND": KVLayout.HND, "NHD": KVLayout.NHD}
MASKED = "masks are causal, windows or, in PagedAttentionPlan, trees of the new tokens"
ITEMS = "multi-item scoring is not served"
ONE_TABLE = "K, V and the output have the rows that kv_indptr and qo_indptr say"
EXACT = "scores and weights are summed in f32, and every key is weighed"
COMPILED = "no kernel of the caller's is compiled or called"
WHY = {
    "args": COMPILED,
    "custom_mask": MASKED,
    "custom_mask_buf": MASKED,
    "jit_args": COMPILED,
    "jit_kwargs": COMPILED,
    "kv_cache_sf": "NVFP4 caches are not served",
    "mask_indptr_buf": MASKED,
    "max_item_len_ptr": ITEMS,
    "o_indptr": ONE_TABLE,
    "o_scale": "the output has q's dtype, and no scale",
    "packed_custom_mask": MASKED,
    "prefix_len_ptr": ITEMS,
    "scale_k": "q has 16 bits: k_scale is the scale of K",
    "scale_q": "q has 16 bits",
    "scale_v": "q has 16 bits: v_scale is the scale of V",
    "skip_softmax_threshold_scale_factor": EXACT,
    "token_pos_in_items_len": ITEMS,
    "token_pos_in_items_ptr": ITEMS,
    "use_fp16_qk_reduction": EXACT,
    "use_fp16_softmax": EXACT,
    "uses_spcompress": EXACT,
    "v_indptr": ONE_TABLE,
    "window_right": "several rows of decode are causal, and one row stands at the last token",
}


def refuse(**arguments: Any) -> None:
    """Raises Unsupported for all given arguments: those that are not None, False, 0 or empty."""
    given = [name for name, value in arguments.items() if isinstance(value, Tensor) or value]
    if given:
        raise Unsupported([f"{name}: {WHY[name]}" for name in given])


def layout_named(kv_layout: str) -> KVLayout:
    """Returns the layout of that name. Raises InvalidProblem for another name than NHD and HND."""
    if kv_layout not in LAYOUTS:
        raise InvalidProblem("kv_layout", kv_layout, 'must be "NHD" or "HND"')
    return LAYOUTS[kv_layout]


def dtype_named(name: str, value: str | torch.dtype) -> torch.dtype:
    """Returns the dtype of that name. Raises InvalidProblem for a value that names no torch.dtype."""
    dtype = getattr(torch, value, None) if isinstance(value, str) else value
    if not isinstance(dtype, torch.dtype):
        raise InvalidProblem(name, value, "must be a torch.dtype or the name of one")
    return dtype


def preference_of(fixed_split_size: int | None, disable_split_kv: bool) -> PlanPreference | None:
    """A batch-invariant choice if either argument is set: callers want a row's bits not to depend on the batch."""
    invariant = disable_split_kv or fixed_split_size not in (None, -1)
    return PlanPreference(batch_invariant=True) if invariant else None


def heads_and_types(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_vo: int | None,
    q_data_type: str | torch.dtype,
    kv_data_type: str | torch.dtype | None,
    o_data_type: str | torch.dtype | None,
) -> dict[str, Any]:
    """The descriptor fields that follow from a plan()'s sizes and types. Raises Unsupported, InvalidProblem."""
    q_dtype = dtype_named("q_data_type", q_data_type)
    kv_dtype = q_dtype if kv_data_type is None else dtype_named("kv_data_type", kv_data_type)
    out_dtype = q_dtype if o_data_type is None else dtype_named("o_data_type", o_data_type)
    reasons = []
    if head_dim > MAX_HEAD_DIM:
        reasons.append(f"head_dim = {head_dim}: at most {MAX_HEAD_DIM} is served")
    if head_dim_vo not in (None, head_dim):
        reasons.append(f"head_dim_vo = {head_dim_vo}: V has K's head_dim, {head_dim}")
    if kv_dtype not in KV_DTYPES:
        reasons.append(f"kv_data_type = {kv_dtype}: {', '.join(map(str, KV_DTYPES))} are served, NVFP4 is not")
    if out_dtype != q_dtype:
        reasons.append(f"o_data_type = {out_dtype}: the output has q's dtype, {q_dtype}")
    if reasons:
        raise Unsupported(reasons)
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    return {**sizes, "q_dtype": q_dtype, "kv_dtype": KV_DTYPES[kv_dtype]}


@dataclass(frozen=True)
class Scores:
    """The arguments about scores. Raises Unsupported or InvalidProblem if no plan serves one, InvalidArgument for a tensor.

    FlashInfer's ALiBi bias is linear in the key's position, ours in its distance: the outputs are the same under a causal
    mask without a cap, and an lse differs by the slope times the query's position.
    """

    causal: bool = True
    pos_encoding_mode: str = "NONE"
    window_left: int = -1
    logits_soft_cap: float | None = None
    sm_scale: float | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            refuse_tensor(name, value)
        if self.pos_encoding_mode == "ROPE_LLAMA":
            raise Unsupported(["pos_encoding_mode = 'ROPE_LLAMA': rotary positions are applied before attention"])
        if self.pos_encoding_mode not in ("NONE", "ALIBI"):
            raise InvalidProblem("pos_encoding_mode", self.pos_encoding_mode, 'must be "NONE", "ALIBI" or "ROPE_LLAMA"')
        if self.alibi and self.softcap is not None:
            raise Unsupported(["logits_soft_cap: beside ALIBI it is not served, FlashInfer adds the bias before its cap"])
        if self.alibi and not self.causal:
            raise Unsupported(
                ["causal = False: beside ALIBI it is not served, FlashInfer's bias grows for keys ahead of the query"]
            )

    @property
    def alibi(self) -> bool:
        """Whether scores have an ALiBi bias."""
        return self.pos_encoding_mode == "ALIBI"

    @property
    def window(self) -> int | None:
        """window_left as a descriptor takes it."""
        return self.window_left if self.window_left >= 0 else None

    @property
    def softcap(self) -> float | None:
        """The cap as a descriptor takes it."""
        return self.logits_soft_cap if self.logits_soft_cap is not None and self.logits_soft_cap > 0 else None

    def slopes(self, num_heads: int, device: torch.device) -> Tensor | None:
        """f32 [num_heads]; None without ALiBi."""
        return get_alibi_slopes(num_heads, device) if self.alibi else None

    def fields(self) -> dict[str, Any]:
        """The fields of every descriptor, except the causal mask."""
        return {
            "window_left": self.window,
            "softcap": self.softcap,
            "alibi": self.alibi,
            "softmax_scale": self.sm_scale,
            "lse_base": "2",
        }

    def refuse_what_alibi_changes(self, lse: bool, sinks: Tensor | None) -> None:
        """Raises Unsupported for an lse or sinks under ALiBi."""
        why = "beside ALIBI it is not served, FlashInfer counts the bias from another position"
        reasons = [f"{name}: {why}" for name, given in (("return_lse", lse), ("sinks", sinks is not None)) if given]
        if self.alibi and reasons:
            raise Unsupported(reasons)


def check_window(window_left: int | None, scores: Scores | None) -> None:
    """Raises InvalidArgument if a run()'s window differs from the planned one."""
    if scores is not None and window_left not in (None, scores.window_left):
        raise InvalidArgument("window_left", f"is {window_left}, must be None or as planned, {scores.window_left}")


def scaled(q_scale: float | Tensor, k_scale: float | Tensor | None) -> float | Tensor:
    """The scale of K times the scale of q. Raises Unsupported for a q_scale that is a tensor."""
    if isinstance(q_scale, Tensor):
        raise Unsupported(["q_scale: a float is served, a tensor is not"])
    return q_scale if k_scale is None else q_scale * k_scale
