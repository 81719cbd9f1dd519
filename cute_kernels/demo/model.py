"""A small byte-level decoder-only language model with grouped-query attention and rotary positions, in plain PyTorch.

The model does not own its attention: `ByteLM.forward` takes an `attend` function, so that training, prefill, the check over the
whole prefix and the paged decode plan all run the same layers. Activations are f32; only q, k and v are ever rounded to f16.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InvalidProblem

WEIGHTS = Path(__file__).parent  # model.npz and model.json
VOCABULARY = 256  # one token per byte

# attend(layer, q [batch, n, num_heads, head_dim], k, v [batch, n, num_kv_heads, head_dim]) -> the shape of q, f32
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Facts = dict[str, float | int]


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of a ByteLM. num_heads is a multiple of num_kv_heads; context is the length, in bytes, that it is trained at."""

    d_model: int = 192
    num_layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 32
    d_hidden: int = 512
    context: int = 256
    rope_base: float = 10_000.0

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise InvalidProblem("num_heads", self.num_heads, f"must be a multiple of num_kv_heads = {self.num_kv_heads}")
        if self.head_dim % 2:
            raise InvalidProblem("head_dim", self.head_dim, "must be even: rotary positions turn pairs")


def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary positions: x [batch, n, heads, head_dim], positions int64 [batch, n]; pairs are (i, i + head_dim / 2)."""
    half = x.shape[-1] // 2
    frequency = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = (positions[..., None] * frequency)[:, :, None, :]  # [batch, n, 1, half]
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


class Block(nn.Module):
    """Pre-norm attention and a GELU MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        d, q_width, kv_width = config.d_model, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.widths = [q_width, kv_width, kv_width]
        self.norm_attention = nn.RMSNorm(d)
        self.norm_mlp = nn.RMSNorm(d)
        self.qkv = nn.Linear(d, sum(self.widths), bias=False)
        self.project = nn.Linear(q_width, d, bias=False)
        self.up = nn.Linear(d, config.d_hidden, bias=False)
        self.down = nn.Linear(config.d_hidden, d, bias=False)

    def forward(self, x: Tensor, positions: Tensor, attend: Attend, layer: int) -> Tensor:
        """x f32 [batch, n, d_model], positions int64 [batch, n] -> the shape of x."""
        q, k, v = (
            t.unflatten(-1, (-1, self.config.head_dim)) for t in self.qkv(self.norm_attention(x)).split(self.widths, dim=-1)
        )
        q, k = rotate(q, positions, self.config.rope_base), rotate(k, positions, self.config.rope_base)
        x = x + self.project(attend(layer, q, k, v).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class ByteLM(nn.Module):
    """Bytes in, logits of the next byte out; embedding and output weights are shared."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(VOCABULARY, config.d_model)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.RMSNorm(config.d_model)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                last = name.endswith(("project.weight", "down.weight"))  # residual branches, two per layer, start small
                nn.init.normal_(p, std=0.02 / (2 * config.num_layers) ** 0.5 if last else 0.02)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens, positions int64 [batch, n] -> logits f32 [batch, n, 256]."""
        x = self.embed(tokens)
        for layer, block in enumerate(self.blocks):
            x = block(x, positions, attend, layer)
        return self.norm(x) @ self.embed.weight.T


def attend_fused(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention for training: PyTorch's fused kernel in f32."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def attend_whole_prefix(_layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention in f64 over q, k and v rounded to f16, as a decode plan gets them: the demo is checked against it."""
    n, group_size = q.shape[1], q.shape[2] // k.shape[2]
    q, k, v = (t.half().double().transpose(1, 2) for t in (q, k, v))  # [batch, heads, n, head_dim]
    k, v = (t.repeat_interleave(group_size, dim=1) for t in (k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    future = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
    return (scores.masked_fill(future, -torch.inf).softmax(-1) @ v).transpose(1, 2).float()


def whole_prefix_logits(model: ByteLM, tokens: Tensor, attend: Attend = attend_whole_prefix) -> Tensor:
    """Logits f32 [batch, n, 256] of every prefix of tokens [batch, n], without any cache."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    return model(tokens, positions, attend)


def save_model(model: ByteLM, facts: Facts, folder: Path = WEIGHTS) -> None:
    """Writes model.npz (f16 arrays by parameter name) and model.json (the config, and `facts` of the training)."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: p.detach().cpu().half().numpy() for name, p in model.state_dict().items()}
    np.savez_compressed(folder / "model.npz", allow_pickle=False, **arrays)
    (folder / "model.json").write_text(json.dumps({"config": asdict(model.config), "training": facts}, indent=2) + "\n")


def load_model(device: str = "cpu", folder: Path = WEIGHTS) -> ByteLM:
    """The trained model with f32 parameters, on `device`. Raises FileNotFoundError if `folder` has no weights."""
    config = ModelConfig(**json.loads((folder / "model.json").read_text())["config"])
    model = ByteLM(config)
    with np.load(folder / "model.npz", allow_pickle=False) as arrays:
        model.load_state_dict({name: torch.from_numpy(arrays[name]).float() for name in arrays.files})
    return model.to(device).requires_grad_(False).eval()
