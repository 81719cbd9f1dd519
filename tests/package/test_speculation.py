"""Speculation of the demo: drafts, one verifying run a step, the tokens of greedy decoding; with a chain and with a tree."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import Tensor

from cute_kernels.demo import model as lm
from cute_kernels.demo import run, speculate
from cute_kernels.demo.paged import PAGE_SIZE, PagedDecoder, PagedVerifier

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
NUM_TOKENS = 40
MAX_TREE = 40  # new tokens of a row: two words of a tree mask


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors: threads that wait for each other cost more than they bring where cores are shared."""
    with run.one_cpu_thread(), torch.inference_mode():
        yield


def greedy(model: lm.ByteLM, prompts: Sequence[bytes], num_tokens: int, device: str) -> run.Continuation:
    """One token a step through a PagedDecodePlan."""
    decoder = PagedDecoder(model, len(prompts), max(map(len, prompts)) + num_tokens, device)
    noise = torch.zeros(len(prompts), num_tokens, lm.VOCABULARY, device=device)
    return run.decode(decoder, prompts, noise, run.Screen(Console(quiet=True), prompts), temperature=1.0)


def speculated(
    model: lm.ByteLM, prompts: Sequence[bytes], num_tokens: int, device: str = "cpu", verifier: PagedVerifier | None = None
) -> speculate.Speculation:
    capacity = max(map(len, prompts)) + num_tokens
    verifier = verifier or PagedVerifier(model, len(prompts), capacity, device, speculate.MAX_FED)
    return speculate.speculate(verifier, prompts, num_tokens, lambda grown: None)


def assert_greedy(tokens: Tensor, logits: Tensor, expected: run.Continuation) -> None:
    """The same tokens, and none by luck: the two best logits lie further apart than twice what rounding moves them."""
    check = run.compare(tokens, logits, expected.scores, "greedy decoding")
    assert check.mismatches == []
    assert torch.equal(tokens, expected.tokens)
    assert check.margin > 4 * check.score_difference


@pytest.mark.parametrize(
    ("text", "others", "room", "draft"),
    [
        (b"abcdefgh.... abc", [], 8, b"defg"),  # a match of 3 drafts 4
        (b"the same thing, the same", [], 8, b" thing, "),
        (b"the same thing, the same", [], 5, b" thin"),
        (b"the same thing, the same", [], 0, b""),
        (b"xyz", [b"wxyz"], 8, b""),  # nothing follows there
        (b"xyz", [b"wxyz", b"xyz is"], 8, b" is"),
        (b"12 xyz34 xyz", [b" xyz other"], 8, b"34 x"),  # a match as long in the text itself goes first
        (b"12 xyz34 xyz", [b"34 xyz other"], 8, b" other"),  # a longer one goes before it
        (b"1 xyza 2 xyzb 3 xyz", [], 8, b"b 3 "),  # the last place where it stands
        (b"ab", [b"abab"], 8, b""),
    ],
)
def test_a_draft_is_what_followed_the_longest_match(text: bytes, others: list[bytes], room: int, draft: bytes) -> None:
    assert speculate.look_up(text, others, room) == draft


def test_a_draft_is_kept_up_to_its_first_wrong_token() -> None:
    assert [speculate.agreeing(draft, b"abcd") for draft in (b"abc", b"abx", b"xbc", b"")] == [3, 2, 0, 0]


@pytest.mark.parametrize("device", DEVICES)
def test_verified_logits_are_those_of_the_whole_prefix(device: str) -> None:
    """Rows with other numbers of new tokens, one with none, over page borders, twice in turn with tokens taken back between."""
    model = lm.load_model(device)
    text = run.SPECULATED[0]
    lengths, counts = [1, PAGE_SIZE - 2, PAGE_SIZE, 2 * PAGE_SIZE + 3], [[5, 9, 0, 1], [9, 1, 3, 9]]
    verifier = PagedVerifier(model, len(lengths), 80, device, speculate.MAX_FED)
    verifier.prefill([text[:n] for n in lengths])
    for fed in counts:
        logits = verifier.verify([text[a : a + n] for a, n in zip(lengths, fed, strict=True)]).split(fed)
        for a, n, ours in zip(lengths, fed, logits, strict=True):
            if n:
                prefix = torch.tensor([list(text[: a + n])], device=device)
                expected = lm.whole_prefix_logits(model, prefix)[0, a:]
                assert float((ours - expected).abs().max()) < 0.01 * float(expected.std())
        assert verifier.seq_lens.tolist() == [a + n for a, n in zip(lengths, fed, strict=True)]
        verifier.drop([n - 1 if n else 0 for n in fed])
        lengths = [a + min(n, 1) for a, n in zip(lengths, fed, strict=True)]


@pytest.mark.parametrize("device", DEVICES)
def test_the_demos_prompts_give_greedy_tokens_and_several_a_step(device: str) -> None:
    model = lm.load_model(device)
    expected = greedy(model, run.SPECULATED, 120, device)
    decoded = speculated(model, run.SPECULATED, 120, device)
    assert_greedy(decoded.tokens, decoded.logits, expected)
    assert decoded.row_steps + decoded.accepted == len(run.SPECULATED) * 119
    assert decoded.tokens_a_step > 4
    assert decoded.steps < 60
    assert run.compare(decoded.tokens, decoded.logits, expected.scores, "").margin > 0.04


@pytest.mark.parametrize(("right", "tokens_a_step"), [(0, 1), (3, 4), (8, 9)])
def test_drafts_that_are_wrong_from_some_token_on_change_nothing(
    right: int, tokens_a_step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a row's length the cache is poisoned after each step: what was rejected is never read."""
    model, prompts = lm.load_model(), run.SPECULATED[:3]
    expected = greedy(model, prompts, NUM_TOKENS, "cpu")
    texts = [prompt + bytes(row.tolist()) for prompt, row in zip(prompts, expected.tokens, strict=True)]

    def draft(text: bytes, _others: Sequence[bytes], room: int) -> bytes:
        true = next(whole for whole in texts if whole.startswith(text))[len(text) :][:8]
        return (true[:right] + bytes(token ^ 1 for token in true[right:]))[:room]

    class Poisoned(PagedVerifier):
        def drop(self, counts: Sequence[int]) -> None:
            super().drop(counts)
            for row, length in enumerate(self.seq_lens.tolist()):
                positions = torch.arange(length, self.table.shape[1] * PAGE_SIZE)
                pages, slots = self.slots(torch.full_like(positions, row), positions)
                self.k_cache[:, pages, :, slots] = self.v_cache[:, pages, :, slots] = torch.nan

    monkeypatch.setattr(speculate, "look_up", draft)
    verifier = Poisoned(model, len(prompts), max(map(len, prompts)) + NUM_TOKENS, "cpu", speculate.MAX_FED)
    decoded = speculated(model, prompts, NUM_TOKENS, verifier=verifier)
    assert_greedy(decoded.tokens, decoded.logits, expected)
    assert decoded.steps == -(-(NUM_TOKENS - 1) // tokens_a_step)


def test_a_rejected_token_that_is_kept_fails_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculate, "agreeing", lambda draft, best: len(draft))
    console = Console(file=(tmp_path / "demo.txt").open("w"), width=200, highlight=False)
    assert run.run_demo("cpu", NUM_TOKENS, console=console) == 1
    console.file.flush()
    printed = (tmp_path / "demo.txt").read_text()
    assert "the plan gives " in printed
    last = printed.rstrip().splitlines()[-1]
    assert last.startswith("FAILED: ")
    assert last.endswith("rows differ from greedy decoding")


@dataclass(frozen=True)
class Tree:
    """Drafts of one row that share their beginnings: token i follows token parents[i]; token 0 is the one that is known."""

    tokens: bytes
    parents: list[int]

    @classmethod
    def of(cls, known: bytes, drafts: Sequence[bytes]) -> Tree:
        tokens, parents, places = known, [-1], {b"": 0}
        for draft in drafts:
            for end in range(1, len(draft) + 1):
                if draft[:end] not in places:
                    places[draft[:end]] = len(tokens)
                    parents.append(places[draft[: end - 1]])
                    tokens += draft[end - 1 : end]
        return cls(tokens, parents)

    def path(self, token: int) -> list[int]:
        """The tokens from the known one to this one."""
        return ([] if self.parents[token] < 0 else self.path(self.parents[token])) + [token]

    def depths(self) -> list[int]:
        return [len(self.path(token)) - 1 for token in range(len(self.tokens))]

    def mask(self) -> list[list[int]]:
        """The words of each token: it sees its path."""
        masks = [sum(1 << seen for seen in self.path(token)) for token in range(len(self.tokens))]
        return [[signed(mask >> 32 * word & 0xFFFFFFFF) for word in range(-(-MAX_TREE // 32))] for mask in masks]

    def best_path(self, best: Sequence[int]) -> list[int]:
        """The longest path of tokens that the model puts behind those before them; best[i] is what it puts behind token i."""
        path = [0]
        while True:
            children = [i for i, parent in enumerate(self.parents) if parent == path[-1] and self.tokens[i] == best[path[-1]]]
            if not children:
                return path
            path += children


def signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word


def compact(verifier: PagedVerifier, row: int, before: int, path: list[int]) -> None:
    """Moves K and V of the path's tokens to the places behind position `before`, in their order, in each layer."""
    rows = torch.full((len(path),), row, device=verifier.device)
    source = verifier.slots(rows, before + torch.tensor(path, device=verifier.device))
    target = verifier.slots(rows, before + torch.arange(len(path), device=verifier.device))
    for cache in (verifier.k_cache, verifier.v_cache):
        cache[:, target[0], :, target[1]] = cache[:, source[0], :, source[1]].clone()


def speculate_with_trees(
    verifier: PagedVerifier, prompts: Sequence[bytes], num_tokens: int, drafts_of
) -> tuple[Tensor, Tensor, int]:
    """As speculate.speculate, with drafts_of(text, room) several drafts a row -> tokens, their logits and the steps."""
    logits = [[row] for row in verifier.prefill(prompts)]
    texts = [prompt + bytes([int(rows[0].argmax())]) for prompt, rows in zip(prompts, logits, strict=True)]
    steps = 0
    while any(len(rows) < num_tokens for rows in logits):
        rooms = [num_tokens - len(rows) for rows in logits]
        trees = [
            Tree.of(text[-1:], drafts_of(text, room - 1)) if room else Tree(b"", [])
            for text, room in zip(texts, rooms, strict=True)
        ]
        fed = [tree.tokens for tree in trees]
        words = torch.tensor([words for tree in trees for words in tree.mask()], dtype=torch.int32, device=verifier.device)
        before = verifier.seq_lens.tolist()
        verified = verifier.verify(fed, [tree.depths() for tree in trees], words).split([len(tokens) for tokens in fed])
        rejected = [0] * len(fed)
        for row, (tree, rows) in enumerate(zip(trees, verified, strict=True)):
            if tree.tokens:
                best = rows.argmax(-1).tolist()
                path = tree.best_path(best)
                compact(verifier, row, before[row], path)
                texts[row] += bytes(tree.tokens[i] for i in path[1:]) + bytes([best[path[-1]]])
                logits[row] += rows[path]
                rejected[row] = len(tree.tokens) - len(path)
        verifier.drop(rejected)
        steps += 1
    tokens = torch.tensor([list(text[len(prompt) :]) for text, prompt in zip(texts, prompts, strict=True)])
    return tokens.to(verifier.device), torch.stack([torch.stack(rows) for rows in logits]), steps


def test_a_tree_shares_the_beginnings_of_its_drafts_and_sees_its_paths() -> None:
    tree = Tree.of(b"x", [b"abc", b"abd", b"e"])
    assert (tree.tokens, tree.parents, tree.depths()) == (b"xabcde", [-1, 0, 1, 2, 2, 0], [0, 1, 2, 3, 3, 1])
    assert [words[0] for words in tree.mask()] == [0b1, 0b11, 0b111, 0b1111, 0b10111, 0b100001]
    assert tree.best_path([ord("a"), ord("b"), ord("d"), 0, 0, 0]) == [0, 1, 2, 4]
    assert signed(1 << 31) == -(1 << 31)


@pytest.mark.parametrize("device", DEVICES)
def test_trees_give_greedy_tokens(device: str) -> None:
    """The right continuation is the last branch, or shares its beginning with others; 1 to 40 new tokens a row."""
    model, prompts = lm.load_model(device), run.SPECULATED[:3]
    expected = greedy(model, prompts, NUM_TOKENS, device)
    texts = [prompt + bytes(row.tolist()) for prompt, row in zip(prompts, expected.tokens, strict=True)]

    def drafts(text: bytes, room: int) -> list[bytes]:
        row, whole = next((row, whole) for row, whole in enumerate(texts) if whole.startswith(text))
        true = whole[len(text) :][: min(6, room)]
        wrong = [true[:n] + bytes(token ^ 1 for token in true[n:]) for n in range(6)]
        long = bytes(range(40 - len(Tree.of(b"x", [*wrong, true]).tokens)))  # 40 tokens with the last bit of the second word
        return [[*wrong, true], [long[:room], *wrong[:3], true], [true[:n] for n in range(1, 3)]][row]

    verifier = PagedVerifier(
        model, len(prompts), max(map(len, prompts)) + NUM_TOKENS + MAX_TREE, device, MAX_TREE, tree_mask=True
    )
    tokens, logits, steps = speculate_with_trees(verifier, prompts, NUM_TOKENS, drafts)
    assert_greedy(tokens, logits, expected)
    assert steps == -(-(NUM_TOKENS - 1) // 3)  # the third row has two tokens of its draft and the model's own
