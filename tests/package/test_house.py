"""The package's rooms: imports run one way, no private name crosses a module, every room is in the wheel."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "cute_kernels"
# each room may import from those before it; docs/design.md says what lives there
ROOMS = (
    "errors",
    "memory",
    "config",
    "checks",
    "kv",
    "device",
    "compile",
    "planning",
    "attention",
    "backward",
    "weights",
    "append",
    "merge",
    "api",
    "integrations",
    "doctor",
    "demo",
    "bench",
    "options",
    "cli",
)
FACES = ("__init__", "__main__")  # they hand names on

Import = tuple[str, str, str]  # the importing module, the module that it imports from, the name


def imports(folder: Path = PACKAGE) -> Iterator[Import]:
    """Every relative import of the package, within functions too."""
    for path in sorted(folder.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level:
                above = module.split(".")[: -node.level]
                for alias in node.names:
                    yield module, ".".join([*above, *(node.module or alias.name).split(".")]), alias.name


def room_of(module: str) -> str:
    return module.split(".")[0]


def test_imports_run_one_way() -> None:
    against = [
        (module, target)
        for module, target, _ in imports()
        if room_of(module) not in FACES
        and room_of(target) != "__version__"
        and ROOMS.index(room_of(target)) > ROOMS.index(room_of(module))
    ]
    assert against == []


def test_operations_do_not_know_each_other() -> None:
    """But for weights and the backward, which are those of attention: its problem, its checks and its scores."""
    operations = {"attention", "backward", "weights", "append", "merge"}
    known = {(room_of(m), room_of(t)) for m, t, _ in imports() if {room_of(m), room_of(t)} <= operations}
    assert {(importer, room) for importer, room in known if importer != room} == {
        ("backward", "attention"),
        ("weights", "attention"),
    }


def test_every_room_is_known() -> None:
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert found - set(FACES) == set(ROOMS)


def test_no_private_name_crosses_a_module() -> None:
    assert [found for found in imports() if found[2].startswith("_") and not found[2].startswith("__")] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    """At import time: an import within a function waits until both are there."""
    edges: dict[str, set[str]] = {}
    modules = {".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    for module, target, name in imports():
        edges.setdefault(module, set()).update({target, f"{target}.{name}"} & modules)
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above[above.index(module) :], module))
        if module not in done:
            for target in edges.get(module, ()):
                visit(target, (*above, module))
            done.add(module)

    for module in modules:
        visit(module, ())


@pytest.mark.parametrize("folder", [path.parent for path in sorted(PACKAGE.rglob("__init__.py"))], ids=lambda path: path.name)
def test_every_folder_is_in_the_wheel_and_says_what_lives_there(folder: Path) -> None:
    listed = (ROOT / "pyproject.toml").read_text()
    assert f'"{".".join(folder.relative_to(ROOT).parts)}",' in listed
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
