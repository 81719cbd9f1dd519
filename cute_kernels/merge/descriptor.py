"""The descriptor of a merge: states of several attention calls over disjoint parts of the KV become one state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch

from ..checks.fields import check_alignment, check_extent, check_softmax
from ..config.merge import MAX_COLUMNS, StateType
from ..config.problem import LseBase
from ..errors import InvalidProblem, Unsupported
from ..kv.types import QUERY_DTYPES, vector_bytes

AXES = ("num_states", "batch_size", "num_heads", "head_dim")


@dataclass(frozen=True)
class MergeStatesDescriptor:
    """A merge of `num_states` states of [batch_size, num_heads, head_dim]. Frozen and hashable: it is a cache key.

    dtype: the outs' type, f32, f16 or bf16; lses are f32, in `lse_base`. alignment_bytes: 2, 4, 8 or 16; strides and pointers of
    the outs are multiples of it, and None stands for the alignment of compact tensors. sinks: whether a run is given f32
    [num_heads], natural logits that join the softmax's denominator once; the states are made without them. batch_size 0 is legal.

    Raises InvalidProblem for an extent or a choice that breaks its rule, then Unsupported for a dtype that no variant knows.
    """

    num_states: int
    batch_size: int
    num_heads: int
    head_dim: int
    dtype: torch.dtype
    lse_base: LseBase = "e"
    alignment_bytes: int | None = None
    sinks: bool = False

    def __post_init__(self) -> None:
        for name, least in (("num_states", 1), ("batch_size", 0), ("num_heads", 1), ("head_dim", 1)):
            check_extent(name, getattr(self, name), least)
        check_softmax(None, self.lse_base)
        check_alignment("alignment_bytes", self.alignment_bytes)
        if not isinstance(self.sinks, bool):
            raise InvalidProblem("sinks", self.sinks, "must be a bool")
        if not isinstance(self.dtype, torch.dtype):
            raise InvalidProblem("dtype", self.dtype, "must be a torch.dtype")
        if self.dtype not in QUERY_DTYPES:
            raise Unsupported([f"dtype = {self.dtype}: must be torch.float32, torch.float16 or torch.bfloat16"])

    @property
    def element_type(self) -> StateType:
        """The short name of dtype."""
        return cast(StateType, QUERY_DTYPES[self.dtype].value)

    @property
    def columns(self) -> int:
        """Neighbouring columns that one access of a kernel moves: two, or one if a pair is not aligned."""
        nbytes = vector_bytes(self.head_dim * self.dtype.itemsize, self.alignment_bytes)
        return max(1, min(MAX_COLUMNS, nbytes // self.dtype.itemsize))

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of one state's out, and of the merged out."""
        return self.batch_size, self.num_heads, self.head_dim

    def __str__(self) -> str:
        return (
            f"merge of {self.num_states} states, batch {self.batch_size}, heads {self.num_heads}, head_dim {self.head_dim}, "
            f"{self.element_type}, lse base {self.lse_base}{', sinks' if self.sinks else ''}"
        )
