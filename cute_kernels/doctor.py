"""The parts that this installation and this machine have, and those they lack for the fastest kernels the machine could run."""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from packaging.requirements import Requirement

from .planning.variants import VARIANTS, DeviceFacts

# pyproject.toml's dependencies; a checkout that is not installed has no other list of them
REQUIREMENTS = (
    "torch>=2.11",
    "nvidia-cutlass-dsl[cu13]>=4.8,<5",
    "apache-tvm-ffi>=0.1.11,<0.2",
    "cuda-python",
    "numpy",
    "packaging",
    "typer",
    "rich",
)
DSL = "nvidia-cutlass-dsl"
COMPILERS = {13: f"{DSL}-libs-cu13", 12: f"{DSL}-libs-cu12"}  # by CUDA's major version, the preferred one first
DRIVER_FILE = Path("/proc/driver/nvidia/version")
NO_DEVICE = 100  # cuInit returns this if there is no GPU, or none is visible
SPILLS = "so that CUDA 12 compiles the kernels, some with spilled registers"


@dataclass(frozen=True)
class Missing:
    """Something that is not there, and how to get it."""

    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what}: {self.remedy}"


@dataclass(frozen=True)
class Driver:
    """The NVIDIA driver. cuda: (major, minor) of the newest CUDA that it runs; init: what cuInit returned, 0 for success."""

    cuda: tuple[int, int]
    init: int = 0
    release: str | None = None

    def __str__(self) -> str:
        return "{}, up to CUDA {}.{}".format(self.release or "release unknown", *self.cuda)


@dataclass(frozen=True)
class Setup:
    """The setup that was found. versions: of distributions, None if one is not installed. torch_cuda: CUDA of torch's build.

    gpus: as torch sees them.
    """

    versions: Mapping[str, str | None]
    torch_cuda: str | None
    driver: Driver | None
    gpus: tuple[DeviceFacts, ...]

    @classmethod
    def here(cls) -> Setup:
        """The setup of this process. Starts no kernel."""
        names = (*(Requirement(text).name for text in REQUIREMENTS), *COMPILERS.values())
        gpus = tuple(DeviceFacts.of(torch.device("cuda", index)) for index in range(torch.cuda.device_count()))
        return cls({name: _version(name) for name in names}, torch.version.cuda, _driver(), gpus)

    @property
    def compiler(self) -> int | None:
        """CUDA's major version of the compiler that the DSL takes: the newest installed one that the driver runs."""
        return next((major for major, name in COMPILERS.items() if self.versions.get(name) and self._runs(major)), None)

    def _runs(self, major: int) -> bool:
        return self.driver is None or self.driver.cuda[0] >= major

    def missing(self) -> list[Missing]:
        """Everything that keeps this machine from its best variant. A missing GPU does not count."""
        return [*self._packages(), *self._compilers(), *self._driver(), *self._unserved()]

    def _packages(self) -> list[Missing]:
        found = []
        for text in REQUIREMENTS:
            requirement = Requirement(text)
            version = self.versions.get(requirement.name)
            if version is None:
                found.append(Missing(f"{requirement.name} is not installed", f"pip install '{text}'"))
            elif not requirement.specifier.contains(version, prereleases=True):
                what = f"{requirement.name} is {version}, must be {requirement.specifier}"
                found.append(Missing(what, f"pip install '{text}'"))
        return found

    def _compilers(self) -> list[Missing]:
        version, best = self.versions.get(DSL), COMPILERS[13]
        got = self.versions.get(best)
        if version is None or got == version:
            return []
        remedy = f"pip install '{DSL}[cu13]=={version}'"
        if got is None:
            return [Missing(f"{best} is not installed, {SPILLS}", remedy)]
        return [Missing(f"{best} is {got}, must be {version}, as {DSL} is", remedy)]

    def _driver(self) -> list[Missing]:
        if self.driver is None or self.driver.init == NO_DEVICE:
            return []
        if self.driver.init:
            return [Missing(f"the NVIDIA driver ({self.driver}) fails with error {self.driver.init}", "see what nvidia-smi says")]
        found = []
        if not self._runs(13):
            found.append(Missing(f"the NVIDIA driver is {self.driver}, {SPILLS}", "install release 580 or later"))
        if self.torch_cuda is None:
            remedy = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
            found.append(Missing("torch is a CPU build beside a GPU", remedy))
        elif not self.gpus:
            what = f"torch, built for CUDA {self.torch_cuda}, does not start on the NVIDIA driver ({self.driver})"
            found.append(Missing(what, "install a newer driver, or torch for an older CUDA"))
        return found

    def _unserved(self) -> list[Missing]:
        return [
            Missing(f"cuda:{index}, {facts}, has no variant", "use a GPU of capability 8.x or 9.0, or device='cpu'")
            for index, facts in enumerate(self.gpus)
            if not variants_on(facts)
        ]


def variants_on(facts: DeviceFacts) -> list[str]:
    """The variants that run on such a device, the fastest first, whatever the descriptor."""
    if facts.capability is None:
        return [variant.name for variant in VARIANTS if variant.arch == "cpu"]
    return [variant.name for variant in VARIANTS if variant.target(facts)]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> Driver | None:
    """The driver as the DSL finds it; None if there is none."""
    number = ctypes.c_int(0)
    try:
        library = ctypes.CDLL("libcuda.so.1")
        if library.cuDriverGetVersion(ctypes.byref(number)) or not number.value:
            return None
    except (OSError, AttributeError):
        return None
    return Driver((number.value // 1000, number.value % 1000 // 10), library.cuInit(0), _release())


def _release() -> str | None:
    try:
        match = re.search(r"\d+\.\d+(\.\d+)?", DRIVER_FILE.read_text(encoding="utf-8"))
    except OSError:
        return None
    return match and match.group()
