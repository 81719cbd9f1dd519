"""The kernels of attention's backward, run on CPU tensors one after the other as their plan launches them."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cute_kernels.backward.descriptor import PagedAttentionBackwardDescriptor
from cute_kernels.config.backward import CHAIN_WORDS, WORDS_BYTES, BackwardSpec, backward_supports
from cute_kernels.device.tracing.backward import arguments, build_backward

from .launch import Launch, compiled
from .memory import READ, WRITE

BOTH = READ | WRITE
NAME = re.compile(r"kernel_cutlass_([a-z]+)_")


class Operands(NamedTuple):
    """The operands as the kernels take them: caches are HND; lse has the leading axes of q."""

    dout: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor
    table0: Tensor | None
    table1: Tensor | None
    table2: Tensor | None
    qo_indptr: Tensor | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None
    delta: Tensor
    ranges: Tensor | None
    pages: Tensor | None
    nodes: Tensor | None
    offsets: Tensor | None


def scratch(descriptor: PagedAttentionBackwardDescriptor, lse: Tensor) -> tuple[Tensor | None, ...]:
    """The scratch operands: delta, ranges, pages, nodes, offsets."""
    d = descriptor.attention
    ranges = torch.zeros(d.batch_size, d.num_kv_heads, dtype=torch.int32) if d.q_dtype == torch.float16 else None
    chains: tuple[Tensor | None, ...] = (None, None, None)
    if descriptor.shared_pages:
        per_page, per_node = CHAIN_WORDS
        shapes = (per_page, d.num_pages or 0), (per_node, descriptor.nodes), (d.batch_size,)
        chains = tuple(torch.zeros(shape, dtype=torch.int32) for shape in shapes)
    return (torch.zeros_like(lse), ranges, *chains)


class Backward:
    """Launches the kernels of a spec on one set of operands."""

    def __init__(self, spec: BackwardSpec, descriptor: Any, operands: Operands) -> None:
        assert backward_supports(spec) == []
        self.spec, self.descriptor, self.operands = spec, descriptor, operands
        self.fakes = Operands(*arguments(spec)[: len(Operands._fields)])
        self.status = torch.zeros(4, dtype=torch.int32)
        found: dict[str, list[Any]] = {}
        for program in compiled(build_backward, spec):
            found.setdefault(NAME.match(program.kernel.name)[1], []).append(program)  # type: ignore[index]
        self.programs = found

    def launch(self, name: str, outputs: tuple[str, ...], ctas: int, nbytes: int, seed: int) -> None:
        """Launches one kernel. outputs: the names of the operands after those that all kernels take."""
        launch, attention = Launch(), self.descriptor.attention
        operands, fakes = self.operands._asdict(), self.fakes._asdict()
        for key in ("q", "dout", "out", "lse", "delta", "ranges", "k", "v", "table0", "table1", "table2", "qo_indptr"):
            launch.tensor(operands[key], fakes[key], BOTH if key in ("delta", "ranges") else READ)
        q, values = self.operands.q, attention.launch_values
        extent = q.shape[1 if self.spec.query == "uniform" else 0]
        launch.numbers("i", extent)
        for value in (attention.problem.max_q_len, *values[:2]):
            launch.numbers("i", value)
        for key in ("alibi_slopes", "sinks"):
            launch.tensor(operands[key], fakes[key])
        launch.numbers("f", values[2])
        launch.numbers("f", attention.scale)
        launch.numbers("q", launch.memory.add(self.status, BOTH))
        for key in outputs:
            launch.tensor(operands[key], fakes[key], BOTH)
        launch.run(self.programs[name].pop(0), (ctas, 1, 1), nbytes, seed=seed)

    def run(self, seed: int = 0) -> None:
        """Runs all kernels in the order of their launches."""
        spec, operands, chains = self.spec, self.operands, ("pages", "nodes", "offsets")
        heads = operands.k.shape[1]
        if spec.shared_pages:
            self.launch("chain", chains, 1, WORDS_BYTES, seed)
        self.launch("queries", ("dq",), self.most_query_blocks() * heads, spec.smem_bytes, seed)
        for wanted in spec.passes:
            outputs = tuple(name for name, asked in zip(("dk", "dv"), wanted, strict=True) if asked)
            self.launch("keys", (*outputs, *chains), self.most_key_tiles() * heads, spec.smem_bytes, seed)
        if spec.modifiers.sinks:
            assert operands.dsinks is not None
            self.launch("sinks", ("dsinks",), len(operands.dsinks), WORDS_BYTES, seed)

    def most_query_blocks(self) -> int:
        """Blocks of packed rows that one KV head may have in the batch."""
        spec, q = self.spec, self.operands.q
        blocks = -(-q.shape[1 if spec.query == "uniform" else 0] * spec.group_size // spec.resident_rows)
        indptr = self.operands.qo_indptr
        return q.shape[0] * blocks if indptr is None else blocks + len(indptr) - 1

    def most_key_tiles(self) -> int:
        """Tiles of keys that one KV head may have in the batch."""
        spec, operands = self.spec, self.operands
        batch = operands.q.shape[0] if operands.qo_indptr is None else len(operands.qo_indptr) - 1
        if spec.table_format in ("dense", "csr"):
            assert operands.table0 is not None
            tiles = -(-operands.table0.shape[-1] * spec.page_size // spec.resident_rows)
        else:
            tiles = -(-operands.k.shape[2] // spec.resident_rows)
        return tiles + batch if spec.table_format in ("csr", "packed") else tiles * batch
