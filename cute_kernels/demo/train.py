"""Trains the demo's model on the shipped text: `python -m cute_kernels.demo.train` rewrites the weights next to this file.

3,800 steps of 2,048 bytes, 12 passes over the text, take 25 minutes on one CPU core.
"""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from ..errors import MissingDependency
from .model import WEIGHTS, ByteLM, Facts, ModelConfig, attend_fused, save_model, whole_prefix_logits

CORPUS = Path(__file__).parent / "corpus" / "pride_and_prejudice.txt"
HELD_OUT = 0.05  # the share of the text, at its end, that is never trained on


@dataclass(frozen=True)
class TrainConfig:
    """AdamW, a linear warm-up, a cosine decay to a twentieth of the learning rate. batch_size: windows of the model's context."""

    steps: int = 3_800
    batch_size: int = 8
    learning_rate: float = 3e-3
    warmup_steps: int = 150
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0

    def rate(self, step: int) -> float:
        """Learning rate of step 0 .. steps - 1."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress)))


def load_corpus() -> bytes:
    """The text, one paragraph per line: wrapped lines are joined, emphasis marks, titles and chapter headings left out.

    Raises MissingDependency if the package is installed without the text.
    """
    if not CORPUS.is_file():
        raise MissingDependency(CORPUS.name, "the text is part of the checkout and not installed: train there")
    paragraphs = (" ".join(p.split()) for p in CORPUS.read_text("ascii").replace("_", "").split("\n\n"))
    kept = (p for p in paragraphs if any(c.islower() for c in p) and not p.startswith(("Chapter ", "By Jane")))
    return "".join(p + "\n" for p in kept).encode()


def corpus_parts(device: str = "cpu") -> tuple[Tensor, Tensor]:
    """(the bytes that are trained on, the held-out bytes), int64 [n] each."""
    text = torch.tensor(list(load_corpus()), device=device)
    cut = int(len(text) * (1 - HELD_OUT))
    return text[:cut], text[cut:]


@torch.no_grad()
def mean_loss(model: ByteLM, text: Tensor, batch_size: int = 16) -> float:
    """Nats per byte over text, int64 [n], in windows of the model's context; a last part that fills no window is left out."""
    context = model.config.context
    windows = text[: (len(text) - 1) // context * context + 1].unfold(0, context + 1, context)
    losses = [window_loss(model, w) * len(w) for w in windows.split(batch_size)]
    return float(torch.stack(losses).sum() / len(windows))


def window_loss(model: ByteLM, windows: Tensor) -> Tensor:
    """Mean loss, in nats per byte, of predicting windows[:, 1:]; windows int64 [batch, context + 1]."""
    logits = whole_prefix_logits(model, windows[:, :-1], attend_fused)
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def optimizer_of(model: ByteLM, config: TrainConfig) -> torch.optim.AdamW:
    """An AdamW that decays matrices and not norms."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=(0.9, 0.95), fused=True)


def train(model: ByteLM, config: TrainConfig, device: str, folder: Path, evaluate_every: int = 400) -> Facts:
    """Trains `model` in place, writes it to `folder` at every evaluation, and returns the facts written with it last."""
    text, held_out = corpus_parts(device)
    generator = torch.Generator().manual_seed(config.seed)
    optimizer = optimizer_of(model, config)
    offsets = torch.arange(model.config.context + 1, device=device)
    start, facts = time.perf_counter(), {}
    with Progress(BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn()) as progress:
        task = progress.add_task("", total=config.steps)
        for step in range(config.steps):
            for group in optimizer.param_groups:
                group["lr"] = config.rate(step)
            starts = torch.randint(len(text) - len(offsets), (config.batch_size, 1), generator=generator).to(device)
            loss = window_loss(model, text[starts + offsets])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
            progress.update(task, advance=1, description=f"loss {loss.item():.3f}")
            if (step + 1) % evaluate_every == 0 or step + 1 == config.steps:
                losses = {"loss": mean_loss(model, text[: len(held_out)]), "held_out_loss": mean_loss(model, held_out)}
                facts = {**asdict(config), "steps_done": step + 1, "seconds": round(time.perf_counter() - start), **losses}
                save_model(model, facts, folder)
                report = ", ".join(f"{name} {value:.4f}" for name, value in losses.items())
                progress.console.print(f"step {step + 1}: {report} nats a byte")
    return facts


def main(steps: int = TrainConfig.steps, device: str = "cpu", seed: int = 0, folder: Path = WEIGHTS, threads: int = 0) -> None:
    """Train the demo's language model and write its weights. threads: CPU threads, 0 for PyTorch's default."""
    if threads:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)
    model = ByteLM(ModelConfig()).to(device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(load_corpus()):,} bytes of text")
    train(model, TrainConfig(steps=steps, seed=seed), device, folder)


if __name__ == "__main__":
    typer.run(main)
