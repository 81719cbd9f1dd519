"""Compiles kernels and keeps them in memory, one per kernel spec.

`cute.compile` is not thread-safe: one lock serves the process, and many kernels are compiled in processes of their own. A
compile takes two to four seconds; one that takes over a second is announced on stderr when that is a terminal, and always in
the log.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from ..config.append import AppendSpec, append_supports
from ..config.decode import KernelSpec, supports
from ..config.merge import MergeSpec, merge_supports
from ..errors import CompileFailed, Unsupported

Spec = KernelSpec | MergeSpec | AppendSpec

NOTICE_AFTER = 1.0  # seconds

logger = logging.getLogger("cute_kernels")
_lock = threading.Lock()
_kernels: dict[Spec, Callable[..., None]] = {}
_loaded: list[object] = []  # modules of kernels that another process compiled, kept as long as these


def compiled_specs() -> list[Spec]:
    """The specs compiled so far, in order."""
    return list(_kernels)


def compile_decode(spec: KernelSpec) -> Callable[..., None]:
    """Returns fn(q, k, v, table0, table1, table2, k_scale, v_scale, out, lse, workspace, softmax_scale, num_ctas, status).

    Compiled once, without a GPU. Raises Unsupported when `supports` rejects the spec, CompileFailed when the compiler fails.
    """
    return _kernels.get(spec) or _compile_once(spec, supports(spec), f"{spec.arch} decode", _build_decode)


def compile_ahead(specs: Iterable[KernelSpec], processes: int | None = None) -> int:
    """Compiles decode kernels several at a time, for compile_decode to find, and returns how many.

    processes: at most, by default as many as there are CPUs. Left out are specs that are compiled already, that `supports`
    rejects, or that fail here: compile_decode says why. Runs the caller's main module again, as `multiprocessing` does.
    """
    wanted = [spec for spec in dict.fromkeys(specs) if spec not in _kernels and not supports(spec)]
    workers = min(processes or os.cpu_count() or 1, len(wanted))
    if workers < 2:
        for spec in wanted:
            with suppress(CompileFailed):
                compile_decode(spec)
        return sum(spec in _kernels for spec in wanted)
    with TemporaryDirectory() as folder, ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        paths = [Path(folder) / f"{i}.o" for i in range(len(wanted))]
        jobs = [pool.submit(_export, spec, path) for spec, path in zip(wanted, paths, strict=True)]
        done = [(spec, path) for spec, path, job in zip(wanted, paths, jobs, strict=True) if job.exception() is None]
        with _lock:
            for spec, path in done:
                _kernels[spec] = _load(path)
    return len(done)


def _export(spec: KernelSpec, path: Path) -> None:
    from ..device.tracing.objects import export

    export(spec, path)


def _load(path: Path) -> Any:
    from ..device.tracing.objects import load

    kernel, module = load(path)
    _loaded.append(module)
    return kernel


def as_operand(tensor: Tensor) -> Any:
    """A tensor as compiled kernels take it: it holds the storage, and costs a launch nothing to take apart.

    The tensor itself where that form would lose strides, which DLPack may do on axes of length 1: TMA needs them.
    """
    import tvm_ffi

    operand = tvm_ffi.from_dlpack(tensor)
    return operand if tuple(operand.strides) == tensor.stride() else tensor


def compile_merge(spec: MergeSpec) -> Callable[..., None]:
    """Returns fn(outs, lses, out, lse), compiled at most once. Needs no GPU; raises as compile_decode does."""
    return _kernels.get(spec) or _compile_once(spec, merge_supports(spec), f"{spec.target} merge", _build_merge)


def compile_append(spec: AppendSpec) -> Callable[..., None]:
    """Returns fn(*append_checks.Operands, status), as compile_merge does."""
    return _kernels.get(spec) or _compile_once(spec, append_supports(spec), f"{spec.arch} append", _build_append)


def _build_decode(spec: Any) -> Any:
    from ..device.tracing.decode import build

    return build(spec)


def _build_merge(spec: Any) -> Any:
    from ..device.tracing.merge import build_merge

    return build_merge(spec)


def _build_append(spec: Any) -> Any:
    from ..device.tracing.append import build_append

    return build_append(spec)


def _compile_once(spec: Spec, reasons: list[str], what: str, build: Callable[[Any], Any]) -> Callable[..., None]:
    if reasons:
        raise Unsupported(reasons)
    with _lock:
        if spec not in _kernels:
            _kernels[spec] = _compile(spec, what, build)
        return _kernels[spec]


def _compile(spec: Spec, what: str, build: Callable[[Any], Any]) -> Any:
    started = time.perf_counter()
    notice = threading.Timer(NOTICE_AFTER, _announce, [spec, what])
    notice.daemon = True
    notice.start()
    try:
        kernel = build(spec)
    except Exception as error:
        raise CompileFailed(f"spec={spec}: {error}") from error
    finally:
        notice.cancel()
    logger.info("compiled %s in %.1f s", spec, time.perf_counter() - started)
    return kernel.__tvm_ffi_object__() or kernel  # the raw function costs 0.6 us less a call; None where no GPU can load it


def _announce(spec: Spec, what: str) -> None:
    logger.info("compiling %s", spec)
    if sys.stderr.isatty():
        print(f"cute_kernels: compiling {what}, head_dim {spec.head_dim}, {spec.element_type} ...", file=sys.stderr)
