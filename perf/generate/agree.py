"""Whether two implementations agree: their tokens up to the first near tie, and their logits, compared with f32's."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from perf.generate.models import use


@dataclass(frozen=True)
class Agreement:
    """One prompt's agreement.

    first_tie: the first step whose two best logits, by sdpa, are closer than sdpa and eager are anywhere, or None.
    first_difference: the first step at which tokens differ, or None. Errors: root mean square and largest, of logits against f32.
    below: the most by which our tokens' logits are below f32's best; sdpas_below: sdpa's.
    """

    steps: int
    first_tie: int | None
    first_difference: int | None
    ours: tuple[float, float]
    sdpas: tuple[float, float]
    below: float
    sdpas_below: float

    @property
    def holds(self) -> bool:
        """Whether tokens equal sdpa's up to the first tie, and logits are as near to f32 as sdpa's, within a tenth."""
        same = self.first_difference is None or (self.first_tie is not None and self.first_difference >= self.first_tie)
        return same and self.ours[0] <= 1.1 * self.sdpas[0]


def logits(model: Any, provider: str, prompt: list[int], tokens: list[int]) -> Tensor:
    """f32 [tokens, vocabulary]: the logits that each token is chosen from, when all tokens are given."""
    use(provider, model)
    ids = torch.tensor([prompt + tokens[:-1]], device=model.device)
    with torch.no_grad():
        found: Tensor = model(ids, logits_to_keep=len(tokens), use_cache=False).logits[0].float()
    return found


def agreements(model: Any, prompts: list[list[int]], sdpas: list[list[int]], ours: list[list[int]]) -> list[Agreement]:
    """The agreement on each prompt, with its tokens by sdpa and by ours."""
    exact_model, found = copy.deepcopy(model).float(), []
    for prompt, by_sdpa, by_us in zip(prompts, sdpas, ours, strict=True):
        sdpa, eager, own = (logits(model, provider, prompt, by_sdpa) for provider in ("sdpa", "eager", "ours"))
        exact, exact_of_ours = (logits(exact_model, "sdpa", prompt, tokens) for tokens in (by_sdpa, by_us))
        best = sdpa.topk(2).values
        close = (best[:, 0] - best[:, 1]) <= (sdpa - eager).abs().max()
        differ = [a != b for a, b in zip(by_sdpa, by_us, strict=True)]
        found.append(
            Agreement(
                len(by_sdpa), _first(close.tolist()), _first(differ), _error(own, exact), _error(sdpa, exact),
                _below(exact_of_ours, by_us), _below(exact, by_sdpa),
            )
        )  # fmt: skip
    return found


def _first(flags: list[bool]) -> int | None:
    return next((step for step, flag in enumerate(flags) if flag), None)


def _error(found: Tensor, exact: Tensor) -> tuple[float, float]:
    difference = found - exact
    return float(difference.square().mean().sqrt()), float(difference.abs().max())


def _below(exact: Tensor, tokens: list[int]) -> float:
    chosen = exact.gather(1, torch.tensor(tokens, device=exact.device)[:, None])[:, 0]
    return float((exact.max(-1).values - chosen).max())
