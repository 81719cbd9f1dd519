"""The demo: cached decode against the whole prefix, the shipped weights, the verdict and its exit status, training."""

import json

import pytest
import torch
from rich.console import Console

from cute_kernels.demo import model as lm
from cute_kernels.demo import run
from cute_kernels.demo.paged import PAGE_SIZE, PagedDecoder
from cute_kernels.demo.train import TrainConfig, corpus_parts, load_corpus, mean_loss, train
from cute_kernels.errors import InvalidProblem

SMALL = lm.ModelConfig(d_model=48, num_layers=2, num_heads=6, num_kv_heads=2, head_dim=16, d_hidden=64, context=32)


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: threads that wait for each other cost more than they bring where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def plain_console(tmp_path):
    return Console(file=(tmp_path / "demo.txt").open("w"), width=100, highlight=False)


def small_model():
    torch.manual_seed(1)
    model = lm.ByteLM(SMALL).requires_grad_(False)
    for p in model.parameters():
        p.mul_(4)  # so that attention is far from uniform
    return model


def test_cached_decode_equals_the_whole_prefix_at_ragged_lengths():
    model, steps = small_model(), PAGE_SIZE + 2
    generator = torch.Generator().manual_seed(2)
    lengths = [1, PAGE_SIZE - 1, PAGE_SIZE, 2 * PAGE_SIZE + 3]
    rows = [torch.randint(256, (n + steps,), generator=generator) for n in lengths]
    decoder = PagedDecoder(model, len(rows), max(lengths) + steps, "cpu")
    cached = [decoder.prefill([bytes(row[:n].tolist()) for row, n in zip(rows, lengths, strict=True)])]
    inputs = torch.stack([row[n:] for row, n in zip(rows, lengths, strict=True)])  # [batch, steps]
    cached += [decoder.step(tokens) for tokens in inputs.unbind(1)]
    assert decoder.seq_lens.tolist() == [n + steps for n in lengths]
    for row, n, logits in zip(rows, lengths, torch.stack(cached, 1), strict=True):
        expected = lm.whole_prefix_logits(model, row[None])[0, n - 1 :]
        assert float((logits - expected).abs().max()) < 0.01 * float(expected.std())


def test_one_causal_pass_gives_the_logits_of_each_recomputed_prefix():
    model = small_model()
    tokens = torch.arange(20)[None]
    whole = lm.whole_prefix_logits(model, tokens)
    for n in range(1, 21):
        torch.testing.assert_close(lm.whole_prefix_logits(model, tokens[:, :n])[0, -1], whole[0, n - 1], atol=2e-3, rtol=2e-3)


def test_f64_attention_agrees_with_the_fused_one_of_the_training():
    q, k, v = (torch.randn(2, 9, heads, 16) for heads in (6, 2, 2))
    torch.testing.assert_close(lm.attend_whole_prefix(0, q, k, v), lm.attend_fused(0, q, k, v), atol=5e-3, rtol=5e-3)


def test_the_text_is_clean_ascii_prose():
    text = load_corpus().decode("ascii")
    assert text.startswith(
        "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want"
    )
    assert len(text) == 680_485
    assert not any(mark in text for mark in ("_", "\n\n", "  ", "Chapter", "* *"))


def test_the_shipped_weights_reach_their_stated_loss_on_the_shipped_text():
    model = lm.load_model()
    stated = json.loads((lm.WEIGHTS / "model.json").read_text())["training"]
    text, held_out = corpus_parts()
    assert (lm.WEIGHTS / "model.npz").stat().st_size < 3_000_000
    assert mean_loss(model, text[:16_384]) < 0.95
    assert abs(mean_loss(model, held_out) - stated["held_out_loss"]) < 0.01


def test_the_demo_passes_and_its_requests_keep_clear_of_ties(tmp_path):
    console = plain_console(tmp_path)
    model = lm.load_model()
    assert run.run_demo("cpu", console=console) == 0
    console.file.flush()
    printed = (tmp_path / "demo.txt").read_text()
    assert printed.rstrip().splitlines()[-1].startswith("OK: all ")
    assert "tokens/s on cpu" in printed
    assert "tokens a step and row" in printed
    assert all(prompt.decode()[:40] in printed for prompt in [*(r.prompt for r in run.REQUESTS), *run.SPECULATED])
    with torch.inference_mode():
        noise = run.sampling_noise(run.REQUESTS, 120, "cpu")
        decoder = PagedDecoder(model, len(run.REQUESTS), 256, "cpu")
        prompts = [request.prompt for request in run.REQUESTS]
        decoded = run.decode(decoder, prompts, noise, run.Screen(console, prompts))
        check = run.check_against_whole_prefix(model, run.REQUESTS, noise, decoded)
    assert check.margin > 0.1 > 3 * check.score_difference


def test_noise_depends_on_the_seed_alone_and_samples_the_softmax():
    a, b = run.Request(b"a", 1), run.Request(b"b", 2)
    noise = run.sampling_noise([a, b], 7, "cpu")
    assert torch.equal(run.sampling_noise([b], 3, "cpu")[0], noise[1, :3])
    assert not torch.equal(noise[0], noise[1])
    logits = torch.zeros(256).index_fill(0, torch.tensor([5]), 2.5)
    samples = (logits / run.TEMPERATURE + run.sampling_noise([a], 4000, "cpu")[0]).argmax(-1)
    chance = (logits / run.TEMPERATURE).softmax(-1)[5]
    assert abs(float((samples == 5).float().mean() - chance)) < 0.01


def test_a_wrong_token_is_named_and_fails_the_demo(tmp_path, monkeypatch):
    step = PagedDecoder.step
    monkeypatch.setattr(PagedDecoder, "step", lambda self, tokens: step(self, tokens).roll(1, dims=-1))
    console = plain_console(tmp_path)
    assert run.run_demo("cpu", 4, console=console) == 1
    console.file.flush()
    printed = (tmp_path / "demo.txt").read_text()
    assert "row 0, token 1: the plan gives " in printed
    assert printed.rstrip().splitlines()[-1].startswith(f"FAILED: {len(run.REQUESTS)} rows differ")


@pytest.mark.parametrize(
    ("parameter", "prompts", "max_new_tokens"),
    [
        ("requests", [], 10),
        ("requests", [b"a", b""], 10),
        ("max_new_tokens", [b"a"], 2),
        ("max_new_tokens", [b"a" * 200], 57),
    ],
)
def test_bad_requests_are_typed_errors(parameter, prompts, max_new_tokens):
    with pytest.raises(InvalidProblem, match=parameter):
        run.run_demo("cpu", max_new_tokens, [run.Request(prompt, 0) for prompt in prompts])


@pytest.mark.parametrize(("parameter", "values"), [("num_heads", {"num_heads": 7}), ("head_dim", {"head_dim": 15})])
def test_bad_sizes_are_typed_errors(parameter, values):
    with pytest.raises(InvalidProblem, match=parameter):
        lm.ModelConfig(**values)


def test_training_learns_is_repeatable_and_writes_what_loads(tmp_path):
    config = TrainConfig(steps=12, batch_size=4, warmup_steps=2)
    losses = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        torch.manual_seed(0)
        facts = train(lm.ByteLM(SMALL), config, "cpu", folder)
        assert json.loads((folder / "model.json").read_text())["training"] == facts
        losses.append(facts["loss"])
    assert losses[0] == losses[1] < 4.5  # ln 256 = 5.5 is chance
    loaded = lm.load_model(folder=tmp_path / "a")
    assert loaded.config == SMALL
    text = corpus_parts()[0][:4096]
    assert abs(mean_loss(loaded, text) - losses[0]) < 0.2
