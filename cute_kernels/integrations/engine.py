"""An installed engine: its version, the calls that an integration builds upon, and whether the engine still has them."""

from __future__ import annotations

import inspect
import logging
from importlib import import_module, metadata
from typing import Any, NamedTuple

from ..errors import MissingDependency, Unsupported

logger = logging.getLogger("cute_kernels")
_told: set[str] = set()


class Call(NamedTuple):
    """A function, method or class of an engine that an integration builds upon, and the parameters that it must take."""

    module: str
    name: str
    parameters: tuple[str, ...]


class Engine(NamedTuple):
    """A library that calls attention. package: its name for import and pip. tested: its versions that were tested."""

    package: str
    tested: str
    calls: tuple[Call, ...]

    def part(self, module: str) -> Any:
        """A module of the engine. Raises MissingDependency without the engine, Unsupported if the module cannot be imported."""
        try:
            return import_module(f"{self.package}.{module}")
        except ImportError as error:
            if isinstance(error, ModuleNotFoundError) and error.name == self.package:
                raise MissingDependency(self.package, f"pip install {self.package}; {self.tested} were tested") from error
            raise self.moved(f"{self.package}.{module}", f"cannot be imported: {error}") from error

    def version(self) -> str:
        """The installed version, as the package says, or as its distribution says if the package cannot be imported."""
        try:
            return str(import_module(self.package).__version__)
        except (ImportError, AttributeError):
            found = (each.version for each in metadata.distributions(name=self.package))
            return next(found, "of an unknown version")

    def moved(self, call: str, what: str) -> Unsupported:
        """The error for an engine that differs from the tested versions: it names the installed version and the call."""
        return Unsupported([f"{self.package} {self.version()}: {call} {what}; {self.tested} were tested"])

    def check_calls(self) -> None:
        """Raises Unsupported for the first of `calls` that is gone or lacks a parameter."""
        for module, name, parameters in self.calls:
            found: Any = self.part(module)
            for attribute in name.split("."):
                found = getattr(found, attribute, None)
            if found is None:
                raise self.moved(f"{module}.{name}", "is not there")
            missing = [each for each in parameters if each not in inspect.signature(found).parameters]
            if missing:
                raise self.moved(f"{module}.{name}", f"takes no {', '.join(missing)}")


def tell_once(reason: str) -> None:
    """Writes one line to the log for each reason, the first time it is told."""
    if reason not in _told:
        _told.add(reason)
        logger.warning(reason)
