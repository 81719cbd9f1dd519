"""The demo: a small language model continues several prompts at once, every decode step through a paged cache and `plan.run`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console, Group
from rich.live import Live
from rich.rule import Rule
from rich.text import Text
from torch import Tensor

from ..errors import InvalidProblem
from ..planning.base import ANY_VARIANT, resolved_device
from .model import VOCABULARY, ByteLM, load_model, whole_prefix_logits
from .paged import PagedDecoder

TEMPERATURE = 0.5
MIN_NEW_TOKENS = 3  # the prefill gives the first, the first step warms up, the others are timed
LINE = 40  # bytes of one row that are printed at a time where the output is not a terminal


@dataclass(frozen=True)
class Request:
    """A prompt, and the seed of the noise that samples its continuation."""

    prompt: bytes
    seed: int


# Seeds whose two best bytes stay over 0.1 apart at each of 120 steps; rounding to f16 moves a score by 0.02 to 0.03.
REQUESTS = (
    Request(b"It is a truth universally acknowledged, that", 51),
    Request(b"Not a word", 34),
    Request(b'"Where is my sister?" said Elizabeth;', 35),
    Request(b'"My dear Lizzy," said', 70),
    Request(b"Mr. Bingley was good-looking and gentlemanlike; he had a pleasant countenance, and", 50),
    Request(b'"You are mistaken," replied Mr. Darcy; "', 42),
)


@dataclass(frozen=True)
class Continuation:
    """What the plan decoded: tokens int64 [batch, n], their scores f32 [batch, n, 256], tokens a second after the first step."""

    tokens: Tensor
    scores: Tensor
    tokens_per_second: float


@dataclass(frozen=True)
class Check:
    """The plan's tokens beside the whole prefix's: mismatches, the widest score difference and the narrowest top-two margin."""

    mismatches: list[str]
    score_difference: float
    margin: float


class Screen:
    """Shows the rows as they grow: in place on a terminal, else a line for each LINE bytes of a row, and all rows at the end."""

    def __init__(self, console: Console, requests: Sequence[Request]) -> None:
        self.console = console
        self.prompts = [request.prompt for request in requests]
        self.grown = [b""] * len(requests)
        self.live = Live(console=console, refresh_per_second=12, transient=True)
        if console.is_terminal:
            self.live.start()

    def add(self, tokens: list[int]) -> None:
        """One more byte a row."""
        self.grown = [text + bytes([token]) for text, token in zip(self.grown, tokens, strict=True)]
        if self.console.is_terminal:
            self.live.update(self._frame())
        elif len(self.grown[0]) % LINE == 0:
            for row, text in enumerate(self.grown):
                self.console.print(Text(f"{row}: ...{readable(text[-LINE:])}".replace("\n", " | ")))

    def close(self) -> None:
        self.live.stop()
        self.console.print(self._frame())

    def _frame(self) -> Group:
        texts = (Text.assemble((readable(p), "dim"), readable(g)) for p, g in zip(self.prompts, self.grown, strict=True))
        return Group(*(part for row, text in enumerate(texts) for part in (Rule(f"row {row}", align="left"), text)))


def readable(text: bytes) -> str:
    return text.decode("ascii", "replace")


def sampling_noise(requests: Sequence[Request], num_tokens: int, device: str) -> Tensor:
    """Gumbel noise f32 [batch, num_tokens, 256]: the argmax of logits / TEMPERATURE + noise is a sample of their softmax.

    A request's noise depends on its seed alone, so sampling is as repeatable, and as exactly checked, as greedy decoding.
    """
    noise = [np.random.default_rng(request.seed).gumbel(size=(num_tokens, VOCABULARY)) for request in requests]
    return torch.from_numpy(np.stack(noise)).float().to(device)


def decode(decoder: PagedDecoder, requests: Sequence[Request], noise: Tensor, screen: Screen) -> Continuation:
    """Continues the requests, one a row of the batch; a token is the byte of the best score, logits / TEMPERATURE + noise."""
    num_tokens, start = noise.shape[1], 0.0
    scores: list[Tensor] = []
    tokens: list[Tensor] = []
    for step in range(num_tokens):
        logits = decoder.step(tokens[-1]) if step else decoder.prefill([request.prompt for request in requests])
        scores.append(logits / TEMPERATURE + noise[:, step])
        tokens.append(scores[-1].argmax(-1))
        screen.add(tokens[-1].tolist())  # waits for the device
        if step == 1:
            start = time.perf_counter()
    rate = len(requests) * (num_tokens - 2) / (time.perf_counter() - start)
    return Continuation(torch.stack(tokens, 1), torch.stack(scores, 1), rate)


def check_against_whole_prefix(model: ByteLM, requests: Sequence[Request], noise: Tensor, decoded: Continuation) -> Check:
    """Compares each token with what plain attention over its whole prefix, without a cache, scores best.

    One causal pass a row gives the logits of all its prefixes. Where every token is the best after those before it, decoding that
    recomputes its prefix each step gives the same row, by induction.
    """
    mismatches, difference, margin = [], 0.0, float("inf")
    for row, (request, tokens) in enumerate(zip(requests, decoded.tokens, strict=True)):
        prompt = torch.tensor(list(request.prompt), device=tokens.device)
        logits = whole_prefix_logits(model, torch.cat([prompt, tokens[:-1]])[None])[0, len(prompt) - 1 :]
        expected = logits / TEMPERATURE + noise[row]
        difference = max(difference, float((expected - decoded.scores[row]).abs().max()))
        best = expected.topk(2, dim=-1).values
        margin = min(margin, float((best[:, 0] - best[:, 1]).min()))
        wrong = (expected.argmax(-1) != tokens).nonzero()
        if len(wrong):
            at = int(wrong[0])
            ours, theirs = bytes([int(tokens[at])]), bytes([int(expected[at].argmax())])
            mismatches.append(f"row {row}, token {at}: the plan gives {ours!r}, the whole prefix {theirs!r}")
    return Check(mismatches, difference, margin)


def report(check: Check, num_tokens: int, console: Console) -> int:
    """Prints the check, its verdict last, and returns the exit status."""
    console.print(f"scores differ by at most {check.score_difference:.1e}; the two best bytes by at least {check.margin:.1e}")
    for mismatch in check.mismatches:
        console.print(Text(mismatch, "red"))
    rule = "plain PyTorch attention over the whole prefix"
    if check.mismatches:
        console.print(Text(f"FAILED: {len(check.mismatches)} rows differ from {rule}", "red"))
        return 1
    console.print(Text(f"OK: all {num_tokens} tokens equal those of {rule}", "green"))
    return 0


def validate(requests: Sequence[Request], max_new_tokens: int, context: int) -> None:
    """Raises InvalidProblem unless there are requests, no prompt is empty, and the longest leaves room for the new tokens."""
    if not requests or not all(request.prompt for request in requests):
        raise InvalidProblem("requests", requests, "must be at least one request, no prompt empty")
    room = context - max(len(request.prompt) for request in requests)
    if not MIN_NEW_TOKENS <= max_new_tokens <= room:
        rule = f"must be {MIN_NEW_TOKENS} to {room}, the context of {context} bytes less the longest prompt"
        raise InvalidProblem("max_new_tokens", max_new_tokens, rule)


@contextmanager
def one_cpu_thread() -> Iterator[None]:
    """The model's matrices are too small to share: on two busy cores, two threads decode 27 tokens a second and one 900."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def run_demo(
    device: str | None = None,
    max_new_tokens: int = 120,
    requests: Sequence[Request] = REQUESTS,
    console: Console | None = None,
) -> int:
    """Continues `requests` at once; returns 0 where the tokens equal those of plain attention over the whole prefix, else 1.

    device: "cuda" where there is one, else "cpu". Raises InvalidArgument or Unsupported for a device that is none or is not
    here, InvalidProblem where a prompt is empty or the text outgrows the context.
    """
    console = console or Console(highlight=False)
    device = str(resolved_device(device, ANY_VARIANT))
    model = load_model(device)
    validate(requests, max_new_tokens, model.config.context)
    longest = max(len(request.prompt) for request in requests)
    with one_cpu_thread(), torch.inference_mode():
        decoder = PagedDecoder(model, len(requests), longest + max_new_tokens, device)
        console.print(Text(str(decoder.plan.explain())), soft_wrap=True)
        noise = sampling_noise(requests, max_new_tokens, device)
        with closing(Screen(console, requests)) as screen:
            decoded = decode(decoder, requests, noise, screen)
        check = check_against_whole_prefix(model, requests, noise, decoded)
    console.print(Rule())
    console.print(f"{decoded.tokens_per_second:,.0f} tokens/s on {device}: {len(requests)} rows, {max_new_tokens} tokens each")
    return report(check, decoded.tokens.numel(), console)
