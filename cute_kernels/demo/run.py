"""The demo: a small language model continues several prompts at once, every decode step through a paged cache and `plan.run`.

First it samples, one token per step. Then it decodes greedily, and once more with speculation, several tokens per step.
"""

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
from .paged import PagedDecoder, PagedVerifier
from .speculate import MAX_FED, speculate

TEMPERATURE = 0.5
MIN_NEW_TOKENS = 3  # the prefill gives the first, the first step warms up, the others are timed
LINE = 40  # bytes of one row that are printed at a time if the output is not a terminal


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

# Text that repeats itself, and the model's continuations repeat it too. The logits of the two best bytes stay over 0.04 apart at
# each of 120 greedy steps; the logits of two runs differ by at most 0.01.
SPECULATED = (
    (
        b'"So, Miss Eliza, I heard nothing to be sure, and the sake of the subject of the world. '
        b"I am sure I have no such a proper as to"
    ),
    b'"There is a part of the world. I am sure I have no such a proper as to be as a proper and considerable',
    b"Had she found the latter of his friend, and the rest of the world and her family, and the particulars of the",
    b'"That will make your sister and her mother is a good of to be sure, and the sake of the subject of the world. I am sure I',
    b'"While you are all the country and addressed the same time to be sure."\n"I am sure I have no sorry to be so',
    b'"By all the contrary, and the sake of the subject of the world. I am sure I have no such a proper as to be as a',
)


@dataclass(frozen=True)
class Continuation:
    """Decoded tokens int64 [batch, n], their scores f32 [batch, n, 256], and tokens per second after the first step."""

    tokens: Tensor
    scores: Tensor
    tokens_per_second: float


@dataclass(frozen=True)
class Check:
    """Tokens compared with a reference's: mismatches, the widest score difference and the narrowest top-two margin.

    If half the margin is wider than the difference, rounding cannot have made another token the best.
    """

    reference: str
    num_tokens: int
    mismatches: list[str]
    score_difference: float
    margin: float


class Screen:
    """Shows the rows as they grow: in place on a terminal, else one line per LINE bytes of a row, and all rows at the end."""

    def __init__(self, console: Console, prompts: Sequence[bytes]) -> None:
        self.console = console
        self.prompts = prompts
        self.grown = [b""] * len(prompts)
        self.live = Live(console=console, refresh_per_second=12, transient=True)
        if console.is_terminal:
            self.live.start()

    def show(self, grown: list[bytes]) -> None:
        """Shows the rows. grown: the text after each prompt."""
        before, self.grown = self.grown, grown
        if self.console.is_terminal:
            self.live.update(self._frame())
            return
        for row, (old, text) in enumerate(zip(before, grown, strict=True)):
            for end in range(len(old) // LINE * LINE + LINE, len(text) + 1, LINE):
                self.console.print(Text(f"{row}: ...{readable(text[end - LINE : end])}".replace("\n", " | ")))

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


def decode(
    decoder: PagedDecoder, prompts: Sequence[bytes], noise: Tensor, screen: Screen, temperature: float = TEMPERATURE
) -> Continuation:
    """Continues the prompts, one per row of the batch; a token is the byte of the best score, logits / temperature + noise."""
    num_tokens, start = noise.shape[1], 0.0
    scores: list[Tensor] = []
    tokens: list[Tensor] = []
    grown = [b""] * len(prompts)
    for step in range(num_tokens):
        logits = decoder.step(tokens[-1]) if step else decoder.prefill(prompts)
        scores.append(logits / temperature + noise[:, step])
        tokens.append(scores[-1].argmax(-1))
        grown = [text + bytes([token]) for text, token in zip(grown, tokens[-1].tolist(), strict=True)]  # waits for the device
        screen.show(grown)
        if step == 1:
            start = time.perf_counter()
    rate = len(prompts) * (num_tokens - 2) / (time.perf_counter() - start)
    return Continuation(torch.stack(tokens, 1), torch.stack(scores, 1), rate)


def check_against_whole_prefix(model: ByteLM, requests: Sequence[Request], noise: Tensor, decoded: Continuation) -> Check:
    """Compares each token with the one that plain attention over its whole prefix, without a cache, scores best.

    One causal pass per row gives the logits of all its prefixes. If every token is the best after its prefix, then decoding that
    recomputes the prefix at each step gives the same row, by induction.
    """
    expected = []
    for row, (request, tokens) in enumerate(zip(requests, decoded.tokens, strict=True)):
        prompt = torch.tensor(list(request.prompt), device=tokens.device)
        logits = whole_prefix_logits(model, torch.cat([prompt, tokens[:-1]])[None])[0, len(prompt) - 1 :]
        expected.append(logits / TEMPERATURE + noise[row])
    reference = "plain PyTorch attention over the whole prefix"
    return compare(decoded.tokens, decoded.scores, torch.stack(expected), reference)


def compare(tokens: Tensor, scores: Tensor, expected: Tensor, reference: str) -> Check:
    """Compares tokens int64 [batch, n] and scores f32 [batch, n, 256] with `expected`, the reference's scores in the same places.

    A row's tokens after its first mismatch are not compared, since their prefixes differ.
    """
    mismatches, difference, margin = [], 0.0, float("inf")
    for row, (ours, theirs) in enumerate(zip(tokens, expected.argmax(-1), strict=True)):
        wrong = (ours != theirs).nonzero()
        end = int(wrong[0]) + 1 if len(wrong) else len(ours)
        difference = max(difference, float((expected[row, :end] - scores[row, :end]).abs().max()))
        best = expected[row, :end].topk(2, dim=-1).values
        margin = min(margin, float((best[:, 0] - best[:, 1]).min()))
        if len(wrong):
            got, want = (bytes([int(t[end - 1])]) for t in (ours, theirs))
            mismatches.append(f"row {row}, token {end - 1}: the plan gives {got!r}, {reference} {want!r}")
    return Check(reference, tokens.numel(), mismatches, difference, margin)


def report(checks: Sequence[Check], console: Console) -> int:
    """Prints the checks, the verdict last, and returns the exit status."""
    for check in checks:
        console.print(
            f"beside {check.reference}: scores differ by at most {check.score_difference:.1e}, "
            f"the two best bytes by at least {check.margin:.1e}",
            soft_wrap=True,
        )
        for mismatch in check.mismatches:
            console.print(Text(mismatch, "red"))
    if failed := [check for check in checks if check.mismatches]:
        counts = "; ".join(f"{len(check.mismatches)} rows differ from {check.reference}" for check in failed)
        console.print(Text(f"FAILED: {counts}", "red"), soft_wrap=True)
        return 1
    counts = "; ".join(f"all {check.num_tokens} tokens equal those of {check.reference}" for check in checks)
    console.print(Text(f"OK: {counts}", "green"), soft_wrap=True)
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
    """One CPU thread, as the matrices are too small to share: on two busy cores, two threads decode 27 tokens/s, one 900."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def sample(model: ByteLM, requests: Sequence[Request], num_tokens: int, device: str, console: Console) -> Check:
    """Continues the requests through a PagedDecodePlan, one token per step, and checks them against the whole prefix."""
    longest = max(len(request.prompt) for request in requests)
    decoder = PagedDecoder(model, len(requests), longest + num_tokens, device)
    console.print(Text(str(decoder.plan.explain())), soft_wrap=True)
    noise = sampling_noise(requests, num_tokens, device)
    prompts = [request.prompt for request in requests]
    with closing(Screen(console, prompts)) as screen:
        decoded = decode(decoder, prompts, noise, screen)
    console.print(Rule())
    console.print(f"{decoded.tokens_per_second:,.0f} tokens/s on {device}: {len(requests)} rows, {num_tokens} tokens each")
    return check_against_whole_prefix(model, requests, noise, decoded)


def speculate_beside_greedy(model: ByteLM, prompts: Sequence[bytes], num_tokens: int, device: str, console: Console) -> Check:
    """Decodes greedily, one token per step, then again with speculation through a PagedAttentionPlan; compares both."""
    capacity = max(map(len, prompts)) + num_tokens
    greedy = decode(
        PagedDecoder(model, len(prompts), capacity, device),
        prompts,
        torch.zeros(len(prompts), num_tokens, VOCABULARY, device=device),
        Screen(Console(quiet=True), prompts),
        temperature=1.0,
    )
    verifier = PagedVerifier(model, len(prompts), capacity, device, MAX_FED)
    console.print(Text(str(verifier.plan.explain())), soft_wrap=True)
    with closing(Screen(console, prompts)) as screen:
        decoded = speculate(verifier, prompts, num_tokens, screen.show)
    console.print(Rule())
    console.print(
        f"speculation: {decoded.tokens_a_step:.2f} tokens a step and row, {decoded.steps} steps where greedy decoding takes "
        f"{num_tokens - 1}; {decoded.accepted} of {decoded.drafted} drafted tokens accepted; "
        f"{decoded.tokens_per_second:,.0f} tokens/s, greedy decoding {greedy.tokens_per_second:,.0f}",
        soft_wrap=True,
    )
    return compare(decoded.tokens, decoded.logits, greedy.scores, "greedy decoding")


def run_demo(
    device: str | None = None,
    max_new_tokens: int = 120,
    requests: Sequence[Request] = REQUESTS,
    console: Console | None = None,
) -> int:
    """Continues `requests` at once, then SPECULATED with speculation; returns 0 if the tokens of both pass their checks, else 1.

    The tokens of `requests` must equal those of plain attention over the whole prefix, and the speculated tokens those of greedy
    decoding. device: by default "cuda" if there is one, else "cpu". Raises InvalidArgument or Unsupported for a device that is
    none or is not here, InvalidProblem if a prompt is empty or the text outgrows the context.
    """
    console = console or Console(highlight=False)
    device = str(resolved_device(device, ANY_VARIANT))
    model = load_model(device)
    validate(requests, max_new_tokens, model.config.context)
    num_speculated = min(max_new_tokens, model.config.context - max(map(len, SPECULATED)))
    with one_cpu_thread(), torch.inference_mode():
        sampled = sample(model, requests, max_new_tokens, device, console)
        speculated = speculate_beside_greedy(model, SPECULATED, num_speculated, device, console)
    return report([sampled, speculated], console)
