"""What attention does to scores beyond scaling them, as far as it changes generated code: masks, and functions of a score."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal

QueryForm = Literal["one", "uniform", "ragged"]  # query rows per request: one; equally many; as an indptr on the device says
CausalMask = Literal["none", "bottom_right", "top_left"]


@dataclass(frozen=True)
class Modifiers:
    """Which masks and functions of a score a kernel has; their values are operands of a launch.

    causal: the corner that the diagonal is aligned to, or "none". tree_mask: bits say which new tokens a query row sees. sinks:
    one logit per query head joins the softmax's denominator.
    """

    causal: CausalMask = "none"
    window_left: bool = False
    window_right: bool = False
    tree_mask: bool = False
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False

    @property
    def windows(self) -> bool:
        """Whether keys far from a query row are hidden."""
        return self.window_left or self.window_right

    @property
    def masks(self) -> bool:
        """Whether a query row may see fewer keys than its request has."""
        return self.causal != "none" or self.windows or self.tree_mask

    @property
    def functions(self) -> bool:
        """Whether a function (softcap or ALiBi) is applied to scaled scores."""
        return self.softcap or self.alibi

    @property
    def positional(self) -> bool:
        """Whether a score depends on where its query row stands."""
        return self.masks or self.alibi

    def __str__(self) -> str:
        """The modifiers in use, by name: "causal bottom_right, softcap"; empty if there are none."""
        causal = [] if self.causal == "none" else [f"causal {self.causal}"]
        return ", ".join(causal + [field.name for field in fields(self)[1:] if getattr(self, field.name)])


UNMODIFIED = Modifiers()
