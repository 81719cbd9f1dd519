"""The scales of a cache: how finely it is scaled, and the shapes that its scale tensor may have.

The real value of an element is what is stored times its scale. K and V are scaled independently of each other, and of what
they are stored as.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ..config.problem import ScaleForm
from ..errors import InvalidProblem

Granularity = Literal["none", "tensor", "head", "token"]
GRANULARITIES = ("none", "tensor", "head", "token")
Axes = tuple[tuple[str, int], ...]  # the name and extent of each axis of scales per token


@dataclass(frozen=True)
class KVScale:
    """Scales of one cache. granularity: "none", or one scale per "tensor", per KV "head", or per "token" and KV head.

    dtype: torch.float32, or torch.float16 per token. Raises InvalidProblem for any other choice.
    """

    granularity: Granularity = "none"
    dtype: torch.dtype = torch.float32

    NONE: ClassVar[KVScale]
    TENSOR: ClassVar[KVScale]
    HEAD: ClassVar[KVScale]
    TOKEN: ClassVar[KVScale]
    TOKEN_F16: ClassVar[KVScale]

    def __post_init__(self) -> None:
        if self.granularity not in GRANULARITIES:
            raise InvalidProblem("scale.granularity", self.granularity, f"must be one of {', '.join(GRANULARITIES)}")
        half = self.granularity == "token" and self.dtype == torch.float16
        if self.dtype != torch.float32 and not half:
            raise InvalidProblem("scale.dtype", self.dtype, "must be torch.float32, or torch.float16 per token")

    def __bool__(self) -> bool:
        """Whether there are scales."""
        return self.granularity != "none"

    def __str__(self) -> str:
        return f"{self.granularity} f16" if self.dtype == torch.float16 else self.granularity

    def shapes(self, axes: Axes) -> list[tuple[int, ...]]:
        """The shapes that a scale tensor may have, given the axes of a token's scales; the first is kernel_shape."""
        if self.granularity == "tensor":
            return [(1,), ()]
        if self.granularity == "head":
            return [(dict(axes)["num_kv_heads"],)]
        extents = tuple(extent for _, extent in axes)
        return [extents, (math.prod(extents),)] if axes[0][0] == "num_pages" else [extents]

    def kernel_shape(self, axes: Axes) -> tuple[int, ...]:
        """The shape in which a kernel takes a scale tensor; () if there is none."""
        return self.shapes(axes)[0] if self else ()

    def meaning(self, axes: Axes) -> str:
        """The shapes, in words."""
        if self.granularity == "tensor":
            return "[] or [1]"
        shape, *flat = self.shapes(axes)
        names = ["num_kv_heads"] if self.granularity == "head" else [name for name, _ in axes]
        return f"[{', '.join(names)}] = {list(shape)}" + "".join(f", or {list(other)}" for other in flat)


KVScale.NONE = KVScale("none")
KVScale.TENSOR = KVScale("tensor")
KVScale.HEAD = KVScale("head")
KVScale.TOKEN = KVScale("token")
KVScale.TOKEN_F16 = KVScale("token", torch.float16)

NAMED_SCALES = {  # as records and the command line spell them
    "none": KVScale.NONE,
    "tensor": KVScale.TENSOR,
    "head": KVScale.HEAD,
    "token": KVScale.TOKEN,
    "token-f16": KVScale.TOKEN_F16,
}


def scale_of(name: str, scale: Tensor, num_kv_heads: int, rows: tuple[int, ...]) -> KVScale:
    """The KVScale that a scale tensor stands for, given a cache [*rows, head_dim]. Raises InvalidProblem if it fits none."""
    shape = tuple(scale.shape)
    if shape in ((), (1,)):
        return KVScale.TENSOR
    if shape == (num_kv_heads,):
        return KVScale.HEAD
    if len(shape) == len(rows) or shape == (math.prod(rows),):
        return KVScale.TOKEN_F16 if scale.dtype == torch.float16 else KVScale.TOKEN
    axes = {2: "two", 3: "three"}.get(len(rows), str(len(rows)))
    rule = f"must be [] or [1] for the tensor, [num_kv_heads] = [{num_kv_heads}], or {axes} axes for each token and KV head"
    raise InvalidProblem(f"{name}.shape", shape, rule)


def scale_form(scale: KVScale) -> ScaleForm:
    """How a kernel takes the scales: a single scale is read as if there were one per KV head."""
    if scale.granularity == "token":
        return "token_f16" if scale.dtype == torch.float16 else "token_f32"
    return "head" if scale else "none"
