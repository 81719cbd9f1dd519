"""Compiles kernels and keeps them, one per kernel spec, in memory and on disk.

`cute.compile` is not thread-safe: one lock serves the process, and many kernels are compiled in processes of their own. A
compile takes two to four seconds; one that takes over a second is announced on stderr when that is a terminal, and always in
the log. A kernel that is on disk is loaded in milliseconds, without the compiler.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..config.append import AppendSpec
from ..config.backward import BackwardSpec
from ..config.decode import KernelSpec
from ..config.merge import MergeSpec
from ..config.mixed import MixedSpec
from ..config.weights import WeightsSpec
from ..errors import CompileFailed, InvalidArgument, Unsupported
from . import cache
from .disk import Folder, Untrusted
from .objects import BadObject, Compiled, export, load
from .operations import OPERATIONS, Operation, Spec

if TYPE_CHECKING:
    from torch import Tensor

NOTICE_AFTER = 1.0  # seconds

logger = logging.getLogger("cute_kernels")
_lock = threading.Lock()
_kernels: dict[Spec, Callable[..., None]] = {}


def compiled_specs() -> list[Spec]:
    """The specs whose kernels are in memory, in the order in which they came."""
    return list(_kernels)


def compile_decode(spec: KernelSpec | MixedSpec) -> Callable[..., None]:
    """Returns fn(q, k, v, table0, table1, table2, k_scale, v_scale, out, lse, workspace, softmax_scale, num_ctas, status).

    A kernel that is not `plain` takes further operands (docs/design.md).
    """
    return compile_spec(spec)


def compile_merge(spec: MergeSpec) -> Callable[..., None]:
    """Returns fn(outs, lses, out, lse, sinks)."""
    return compile_spec(spec)


def compile_append(spec: AppendSpec) -> Callable[..., None]:
    """Returns fn(*append.checks.Operands, status)."""
    return compile_spec(spec)


def compile_weights(spec: WeightsSpec) -> Callable[..., None]:
    """Returns fn(*weights.checks.Operands, softmax_scale, max_seq_len, window_left, softcap, status)."""
    return compile_spec(spec)


def compile_backward(spec: BackwardSpec) -> Callable[..., None]:
    """Returns fn(*operands, *workspace_tensors, softmax_scale, max_q_len, window_left, window_right, softcap, status).

    operands are backward.checks.Operands without the workspace.
    """
    return compile_spec(spec)


def compile_spec(spec: Spec) -> Callable[..., None]:
    """The kernel of `spec`: compiled once, without a GPU, or found on disk.

    Raises Unsupported when the spec's operation rejects it, CompileFailed when the compiler fails, InvalidArgument when
    CUTE_KERNELS_CACHE names a folder that cannot be used.
    """
    return _kernels.get(spec) or _compile_once(spec)


def compile_ahead(specs: Iterable[Spec], processes: int | None = None) -> int:
    """Loads kernels from disk, or compiles several at a time, for compile_spec to find; returns how many it got.

    processes: the most at a time, by default as many as there are CPUs. Specs whose kernels are in memory already, that their
    operation rejects, or that fail here are not counted; compile_spec says why. Runs the caller's main module again, as
    `multiprocessing` does.
    """
    wanted = [spec for spec in dict.fromkeys(specs) if spec not in _kernels and not rejections(spec)]
    missing = [spec for spec in wanted if not _recalled(spec)]
    if len(missing) < 2 or (processes or os.cpu_count() or 1) < 2:
        for spec in missing:
            with suppress(CompileFailed):
                compile_spec(spec)
        return sum(spec in _kernels for spec in wanted)
    done = {spec: made for spec, made in objects_of(missing, processes) if isinstance(made, Compiled)}
    with _lock:
        for spec in (spec for spec in missing if spec in done):
            cache.keep_object(spec, done[spec])
            with suppress(*cache.LOAD_ERRORS):
                _kernels[spec] = load(done[spec])
    return sum(spec in _kernels for spec in wanted)


def compile_into(folder: Folder, specs: Iterable[Spec], processes: int | None = None) -> Iterator[tuple[Spec, str]]:
    """Writes each spec's kernel to `folder`, and yields (spec, "compiled", "was there" or why it failed) as each is done.

    Raises InvalidArgument for a folder that is not trusted or cannot be written.
    """
    wanted = list(dict.fromkeys(specs))
    try:
        there = [spec for spec in wanted if _is_in(folder, spec)]
        yield from ((spec, "was there") for spec in there)
        for spec, made in objects_of([spec for spec in wanted if spec not in there], processes):
            if isinstance(made, Compiled):
                cache.write(folder, spec, made)
            yield spec, "compiled" if isinstance(made, Compiled) else f"failed: {made}"
    except (Untrusted, OSError) as error:
        raise InvalidArgument("folder", f"{folder.path}: {getattr(error, 'strerror', None) or error}") from error


def compile_here(specs: Iterable[Spec]) -> Iterator[tuple[Spec, str]]:
    """Compiles kernels for this process, and yields (spec, "compiled" or why it failed)."""
    for spec in specs:
        yield spec, _outcome(spec)


def objects_of(specs: Sequence[Spec], processes: int | None = None) -> Iterator[tuple[Spec, Compiled | BaseException]]:
    """Compiles specs, several at once in processes of their own; yields each with its object, or its error, as it is done."""
    workers = min(processes or os.cpu_count() or 1, len(specs))
    if workers < 2:
        yield from ((spec, _attempt(spec)) for spec in specs)
        return
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        jobs: dict[Future[Compiled], Spec] = {pool.submit(_object_of, spec): spec for spec in specs}
        for job in as_completed(jobs):
            yield jobs[job], job.exception() or job.result()


def rejections(spec: Spec) -> list[str]:
    """Every reason why `spec` cannot be built."""
    return OPERATIONS[type(spec)].supports(spec)


def as_operand(tensor: Tensor) -> Any:
    """A tensor in the form that compiled kernels take: it holds the storage, and costs a launch nothing to take apart.

    Returns the tensor itself if that form would lose strides, as DLPack may on axes of length 1: TMA needs the strides.
    """
    import tvm_ffi

    operand = tvm_ffi.from_dlpack(tensor)
    return operand if tuple(operand.strides) == tensor.stride() else tensor


def _outcome(spec: Spec) -> str:
    try:
        compile_spec(spec)
    except CompileFailed as error:
        return f"failed: {error}"
    return "compiled"


def _object_of(spec: Spec) -> Compiled:
    return export(OPERATIONS[type(spec)].build(spec))


def _attempt(spec: Spec) -> Compiled | Exception:
    try:
        return _object_of(spec)
    except Exception as error:
        return error


def _is_in(folder: Folder, spec: Spec) -> bool:
    try:
        return folder.read(cache.key_of(spec)) is not None
    except BadObject:
        return False


def _recalled(spec: Spec) -> bool:
    """Whether the kernel was on disk, and is now in memory."""
    with _lock:
        kernel = cache.recall(spec)
        if kernel is not None:
            _kernels[spec] = kernel
    return kernel is not None


def _compile_once(spec: Spec) -> Callable[..., None]:
    reasons = rejections(spec)
    if reasons:
        raise Unsupported(reasons)
    with _lock:
        if spec not in _kernels:
            _kernels[spec] = cache.recall(spec) or _compile_alone(spec)
        return _kernels[spec]


def _compile_alone(spec: Spec) -> Any:
    """Compiles `spec`, unless another process has meanwhile left the kernel on disk."""
    with cache.alone(spec):
        found = cache.recall(spec)
        if found is not None:
            return found
        kernel = _compile(spec, OPERATIONS[type(spec)])
        raw = kernel.__tvm_ffi_object__()  # saves 0.6 us per call; None if no GPU can load it
        cache.keep(spec, kernel)
    return raw or kernel


def _compile(spec: Spec, operation: Operation) -> Any:
    started = time.perf_counter()
    notice = threading.Timer(NOTICE_AFTER, _announce, [spec, f"{spec.target} {operation.name}"])
    notice.daemon = True
    notice.start()
    try:
        kernel = operation.build(spec)
    except Exception as error:
        raise CompileFailed(f"spec={spec}: {error}") from error
    finally:
        notice.cancel()
    logger.info("compiled %s in %.1f s", spec, time.perf_counter() - started)
    return kernel


def _announce(spec: Spec, what: str) -> None:
    logger.info("compiling %s", spec)
    if sys.stderr.isatty():
        print(f"cute_kernels: compiling {what}, head_dim {spec.head_dim}, {spec.element_type} ...", file=sys.stderr)
