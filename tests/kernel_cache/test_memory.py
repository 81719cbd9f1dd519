"""The in-memory cache of compiled kernels: one compile a spec, a notice for slow ones, typed failures."""

import threading
import time

import pytest

import cute_kernels as ck
from cute_kernels.compile import kernels as compiler
from cute_kernels.config.decode import KernelSpec
from cute_kernels.device.tracing import decode as builder
from tests.support.specs import usual_spec

SPEC = usual_spec()


class Compiled:
    def __tvm_ffi_object__(self) -> None:
        """No GPU: there is no raw function."""


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[KernelSpec]:
    seen: list[KernelSpec] = []

    def slow(spec: KernelSpec) -> Compiled:
        seen.append(spec)
        time.sleep(0.05)
        return Compiled()

    monkeypatch.setattr(builder, "build", slow)
    monkeypatch.setattr(compiler, "_kernels", {})
    return seen


def test_32_threads_compile_a_spec_once(builds: list[KernelSpec]) -> None:
    kernels: list[object] = []
    threads = [threading.Thread(target=lambda: kernels.append(compiler.compile_decode(SPEC))) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert builds == [SPEC] == compiler.compiled_specs()
    assert len(kernels) == 32
    assert len({id(kernel) for kernel in kernels}) == 1


@pytest.mark.parametrize(("after", "said"), [(0.01, True), (10.0, False)])
def test_a_slow_compile_is_announced(
    after: float, said: bool, builds: list[KernelSpec], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiler, "NOTICE_AFTER", after)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    compiler.compile_decode(SPEC)
    assert ("compiling sm_90a decode, head_dim 128, bf16" in capsys.readouterr().err) == said
    assert builds == [SPEC]


def test_failures_are_typed_and_not_kept(monkeypatch: pytest.MonkeyPatch, builds: list[KernelSpec]) -> None:
    def refuse(spec: KernelSpec) -> None:
        raise RuntimeError("ptxas says no")

    with monkeypatch.context() as patch:
        patch.setattr(builder, "build", refuse)
        with pytest.raises(ck.CompileFailed, match="ptxas says no"):
            compiler.compile_decode(SPEC)
    assert compiler.compiled_specs() == []
    compiler.compile_decode(SPEC)
    assert builds == [SPEC]
