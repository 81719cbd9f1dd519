"""The score modifiers of an attention case: their tensors, and the modified scores in plain PyTorch, for the reference.

A score is scaled, then capped, then biased, then masked. Query row i of n of a request with T tokens stands at T - n + i.
"""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

import torch

from perf.cases import Case

WORD = 32  # bits of a tree mask's word
NO_SCORE = float("-inf")


@dataclass(frozen=True)
class ScoreOperands:
    """alibi_slopes, sinks: f32 [num_heads]. tree_mask: int32 [batch * q_len, words]. Each is None if the case has none.

    Bit j of a row of the mask says whether the row sees new token j of its own request.
    """

    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    tree_mask: torch.Tensor | None = None

    def given(self) -> dict[str, torch.Tensor]:
        """The operands that are not None, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


NO_OPERANDS = ScoreOperands()


def make_operands(case: Case, device: torch.device) -> ScoreOperands:
    """The tensors of a case; the same each time. Sinks are numbers that bf16 holds exactly, since a peer takes them in bf16."""
    slopes = sinks = tree = None
    if case.alibi:
        slopes = 2.0 ** (-8.0 / case.num_heads * torch.arange(1, case.num_heads + 1))
    if case.sinks:
        normal = torch.randn(case.num_heads, generator=torch.Generator().manual_seed(zlib.crc32(case.name.encode())))
        sinks = normal.bfloat16().float()
    if case.tree_mask:
        draw = random.Random(case.name)
        rows = [row for _ in range(case.batch_size) for row in packed(tree_rows(case.q_rows, draw))]
        tree = torch.tensor(rows, dtype=torch.int32)
    return ScoreOperands(*(None if t is None else t.to(device) for t in (slopes, sinks, tree)))


def tree_rows(count: int, draw: random.Random) -> list[int]:
    """The drafts that each of `count` drafts of a random tree sees, as bits: itself and the drafts on its path from the root."""
    seen: list[int] = []
    for token in range(count):
        parent = seen[draw.randrange(token)] if token else 0
        seen.append(parent | 1 << token)
    return seen


def chain_rows(count: int) -> list[int]:
    """The same for drafts that each follow the previous one: a causal mask."""
    return [(2 << token) - 1 for token in range(count)]


def packed(rows: list[int]) -> list[list[int]]:
    """Rows of bits as words of int32."""
    words = -(-len(rows) // WORD)
    unsigned = [[row >> WORD * word & (1 << WORD) - 1 for word in range(words)] for row in rows]
    return [[word - (1 << WORD) * (word >> WORD - 1) for word in row] for row in unsigned]


def bits(words: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` bits of words [..., words]: bool [..., count]."""
    token = torch.arange(count, device=words.device)
    return (words[..., token // WORD] >> token % WORD & 1).bool()


def distances(case: Case, tokens: int, device: torch.device) -> torch.Tensor:
    """How far each key is before each query row of a request of `tokens` tokens: int64 [q rows, tokens]."""
    position = torch.arange(tokens - case.q_rows, tokens, device=device)
    return position[:, None] - torch.arange(tokens, device=device)


def visible(case: Case, operands: ScoreOperands, rows: list[int], tokens: int, device: torch.device) -> torch.Tensor:
    """Which keys the query rows of some requests of one length see: bool [requests or 1, q rows, tokens]."""
    distance = distances(case, tokens, device)
    seen = (distance >= 0)[None]
    if operands.tree_mask is not None:
        of_requests = operands.tree_mask.view(case.batch_size, case.q_rows, -1)[rows]
        earlier = torch.ones(len(rows), case.q_rows, tokens - case.q_rows, dtype=torch.bool, device=device)
        seen = torch.cat([earlier, bits(of_requests, case.q_rows)], dim=-1)
    return seen if case.window_left is None else seen & (distance <= case.window_left)


@dataclass(frozen=True)
class Scores:
    """The score modifiers for some requests of one length and some query heads."""

    case: Case
    operands: ScoreOperands
    rows: list[int]
    heads: slice

    def modified(self, scores: torch.Tensor) -> torch.Tensor:
        """Scaled scores [requests, heads, q rows, tokens], capped, biased and masked."""
        tokens, operands = scores.shape[-1], self.operands
        if self.case.softcap:
            scores = self.case.softcap * torch.tanh(scores / self.case.softcap)
        if operands.alibi_slopes is not None:
            slopes = operands.alibi_slopes[self.heads].to(scores.dtype)[:, None, None]
            scores = scores - slopes * distances(self.case, tokens, scores.device).abs().to(scores.dtype)
        seen = visible(self.case, operands, self.rows, tokens, scores.device)
        return scores.masked_fill(~seen[:, None], NO_SCORE)

    def attention(
        self, dtype: torch.dtype, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention computed in `dtype`: q [requests, q rows, heads, head_dim], k and v [requests, KV heads, tokens, head_dim].

        Returns out in q's shape, and lse [requests, q rows, heads] (natural log), both in `dtype`. Every row sees a key.
        """
        requests, q_rows, heads, _ = q.shape
        grouped = q.to(dtype).transpose(1, 2).unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [.., KV heads, group x rows, ..]
        scores = softmax_scale * grouped @ k.to(dtype).mT
        scores = self.modified(scores.view(requests, heads, q_rows, -1))
        lse = torch.logsumexp(scores, dim=-1)
        if self.operands.sinks is not None:
            lse = torch.logaddexp(lse, self.operands.sinks[self.heads].to(dtype)[:, None])
        weights = torch.exp(scores - lse[..., None]).view(*grouped.shape[:3], -1)
        out = (weights @ v.to(dtype)).view(requests, heads, q_rows, -1)
        return out.transpose(1, 2), lse.transpose(1, 2)
