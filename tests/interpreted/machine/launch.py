"""A launch of a compiled kernel on CPU tensors: its PTX, and the bytes of its parameters as the DSL lays them out."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from cute_kernels.config.problem import UNIT_BYTES
from cute_kernels.config.tiling import RingShape
from tests.support.machine_code import deadlocks

from .copies import TensorMap
from .grid import Grid
from .memory import READ, GlobalMemory
from .program import Program
from .ptx import parse

_programs: dict[tuple[object, Any], list[Program]] = {}


def compiled(build: Callable[[Any, str], object], spec: Any) -> list[Program]:
    """The kernels that build(spec, options) compiles, in the order of its PTX; compiled once per process."""
    if (build, spec) not in _programs:
        _programs[build, spec] = compiled_anew(build, spec)
    return _programs[build, spec]


def compiled_anew(build: Callable[[Any, str], object], spec: Any) -> list[Program]:
    """Compiles the same kernels anew: for kernels with a planted mistake."""
    with tempfile.TemporaryDirectory() as folder:
        build(spec, f"--keep-ptx --dump-dir {folder}")
        (path,) = Path(folder).glob("*.ptx")
        text = path.read_text()
    assert deadlocks(text) == [], "one lane of a warp waits for the others"
    return [Program(kernel) for kernel in parse(text).values()]


class Launch:
    """Gathers the parameters of a launch one by one."""

    def __init__(self) -> None:
        self.memory = GlobalMemory()
        self.blobs: list[bytes] = []

    def tensor(self, tensor: Tensor | None, fake: Any, rights: int = READ, whole_words: bool = False) -> None:
        """Adds a tensor as its fake was traced: its address, then the extents and strides that the fake leaves open."""
        assert (tensor is None) == (fake is None)
        if tensor is None:
            return
        assert len(fake.shape) == tensor.dim(), (fake.shape, tensor.shape)
        axes = [*zip(fake.shape, tensor.shape, strict=True), *zip(fake.stride, tensor.stride(), strict=True)]
        for traced, given in axes:
            assert not isinstance(traced, int) or traced == given, f"traced with {traced}, given {given}"
        open_axes = [given for traced, given in axes if not isinstance(traced, int)]
        self.blobs.append(struct.pack(f"<{1 + len(open_axes)}q", self.memory.add(tensor, rights, whole_words), *open_axes))

    def tensor_map(self, cache: Tensor, ring: RingShape, slots_are_open: bool) -> None:
        """Adds the tensor map of a cache [pages, heads, slots, head_dim] for a ring's boxes, then its coordinate tensor."""
        size = cache.element_size()
        pages, heads, slots, _ = cache.shape
        page_bytes, head_bytes, slot_bytes, _ = (stride * size for stride in cache.stride())
        width, blocks = ring.column_block, ring.units // ring.column_block
        assert cache.shape[3] * size == UNIT_BYTES * ring.units
        axes = [(width, UNIT_BYTES, width), (slots, slot_bytes, ring.box_rows)]
        if blocks > 1:
            axes.append((blocks, width * UNIT_BYTES, 1 if ring.by_block else blocks))
        axes += [(heads, head_bytes, 1), (pages, page_bytes, 1)]
        extents, strides, box = zip(*axes, strict=True)
        address = self.memory.add(cache)
        self.blobs.append(TensorMap(address, extents, strides, box, width * UNIT_BYTES).pack())
        self.numbers("i" * (2 + slots_are_open), *([slots] if slots_are_open else []), heads, pages)

    def numbers(self, form: str, *values: float) -> None:
        """Adds one parameter of numbers; form: their letters in struct."""
        self.blobs.append(struct.pack("<" + form, *values))

    def params(self, program: Program) -> bytes:
        """All parameters' bytes, as the kernel declares them."""
        declared = program.kernel.params
        assert [len(blob) for blob in self.blobs] == [param.size for param in declared], (
            [len(blob) for blob in self.blobs],
            [param.size for param in declared],
        )
        made = bytearray(declared[-1].offset + declared[-1].size)
        for blob, param in zip(self.blobs, declared, strict=True):
            made[param.offset : param.offset + param.size] = blob
        return bytes(made)

    def run(
        self,
        program: Program,
        shape: tuple[int, int, int],
        shared_bytes: int,
        *,
        seed: int = 0,
        resident: int | None = None,
    ) -> Grid:
        """Runs the grid to its end."""
        grid = Grid(program, self.memory, self.params(program), shape, shared_bytes, seed=seed, resident=resident)
        grid.run()
        return grid
