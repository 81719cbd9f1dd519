"""Speculation: the next tokens are drafted from earlier text, verified in one step, and kept as far as the model agrees.

Why the tokens are those of greedy decoding: each is the argmax of the model's logits after its prefix, drafted or not. Attention
of several query rows, and matrices of another height, round in another order than those of one row: the logits of two runs after
the same tokens differ, here by at most 0.01. So the argmax is the same wherever the two best logits are more than twice that
apart, and then the text is the same, by induction. The greedy decoding of the prompts in `run.SPECULATED` keeps the two best
logits 0.04 apart at each step; the demo measures and prints both numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .paged import PagedVerifier

LONGEST_MATCH, SHORTEST_MATCH = 8, 3  # bytes at a text's end that are looked up
LONGEST_DRAFT, SHORTEST_DRAFT = 8, 4
MAX_FED = 1 + LONGEST_DRAFT  # the last known token, and its draft


@dataclass(frozen=True)
class Speculation:
    """Decoded tokens int64 [batch, n], their logits f32 [batch, n, 256], and the steps and time that they took.

    steps: runs of the model after the prefill. row_steps: rows that were still decoding, summed over the steps.
    tokens_per_second: the rate of the steps after the first.
    """

    tokens: Tensor
    logits: Tensor
    steps: int
    row_steps: int
    drafted: int
    accepted: int
    tokens_per_second: float

    @property
    def tokens_a_step(self) -> float:
        """Tokens per step of a row, not counting the prefill's token; greedy decoding has 1."""
        return (self.row_steps + self.accepted) / self.row_steps


def look_up(text: bytes, others: Sequence[bytes], room: int) -> bytes:
    """Drafts the bytes that followed the longest match of the text's end, in the text itself or else in `others`.

    A match of n bytes drafts n bytes, but 4 at least, and `room` at most; a draft is shorter if its source ends. Empty if nothing
    matches.
    """
    for length in range(min(LONGEST_MATCH, len(text)), SHORTEST_MATCH - 1, -1):
        for source in (text[:-1], *others):
            at = source.rfind(text[-length:])
            if at >= 0 and at + length < len(source):
                return source[at + length :][: min(max(length, SHORTEST_DRAFT), room)]
    return b""


def agreeing(draft: bytes, best: Sequence[int]) -> int:
    """How many of the draft's first tokens are the model's own: best[i] is the model's token after the draft's first i."""
    return next((i for i, token in enumerate(draft) if token != best[i]), len(draft))


@dataclass
class Row:
    """A text that grows by num_tokens bytes after its prompt; logits: f32 [256] for each new byte."""

    prompt: bytes
    num_tokens: int
    logits: list[Tensor]
    grown: bytes = b""
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def text(self) -> bytes:
        return self.prompt + self.grown

    @property
    def room(self) -> int:
        return self.num_tokens - len(self.grown)

    def feed(self, others: Sequence[bytes]) -> bytes:
        """The last token, which the cache does not hold yet, and a draft; empty if the row is done: it has no query row then."""
        return self.text[-1:] + look_up(self.text, others, self.room - 1) if self.room else b""

    def accept(self, fed: bytes, logits: Tensor) -> int:
        """Keeps the draft as far as the model agrees, then the model's next token; returns the number of rejected tokens.

        logits: [len(fed), 256].
        """
        if not fed:
            return 0
        best, draft = logits.argmax(-1).tolist(), fed[1:]
        n = agreeing(draft, best)
        self.grown += draft[:n] + bytes([best[n]])
        self.logits += logits[: n + 1]
        self.steps, self.drafted, self.accepted = self.steps + 1, self.drafted + len(draft), self.accepted + n
        return len(draft) - n


def speculate(
    verifier: PagedVerifier, prompts: Sequence[bytes], num_tokens: int, show: Callable[[list[bytes]], None]
) -> Speculation:
    """Decodes num_tokens bytes after each prompt, each the best of its logits; `show` gets the new texts after each step."""
    first = verifier.prefill(prompts)
    best = first.argmax(-1).tolist()
    rows = [Row(prompt, num_tokens, [logits], bytes([token])) for prompt, logits, token in zip(prompts, first, best, strict=True)]
    steps, warm, start = 0, 0, time.perf_counter()
    while any(row.room for row in rows):
        fed = [row.feed([other.text for other in rows if other is not row]) for row in rows]
        verified = verifier.verify(fed).split([len(tokens) for tokens in fed])
        # A rejected token's K and V stay in the cache, past the row's length, until the next tokens take their place.
        verifier.drop([row.accept(tokens, logits) for row, tokens, logits in zip(rows, fed, verified, strict=True)])
        show([row.grown for row in rows])
        steps += 1
        if steps == 1:
            warm, start = sum(len(row.grown) for row in rows), time.perf_counter()
    return Speculation(
        tokens=torch.tensor([list(row.grown) for row in rows], device=first.device),
        logits=torch.stack([torch.stack(row.logits) for row in rows]),
        steps=steps,
        row_steps=sum(row.steps for row in rows),
        drafted=sum(row.drafted for row in rows),
        accepted=sum(row.accepted for row in rows),
        tokens_per_second=(len(rows) * num_tokens - warm) / (time.perf_counter() - start),
    )
