"""python -m perf.compile FOLDER: compiles the kernels that perf.run would compile on a GPU; needs no GPU itself.

A GPU that is rented by the minute then starts timing at once: call perf.run there with CUTE_KERNELS_CACHE=FOLDER. A kernel's key
depends on the source and the compiler that made it, so a folder of another state is not used.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import track

from cute_kernels.compile.disk import Folder
from cute_kernels.compile.kernels import compile_into
from cute_kernels.config.decode import KernelSpec
from cute_kernels.planning.variants import PRETEND
from perf.case_sets import select_cases
from perf.cases import Case
from perf.providers import providers_of
from perf.providers.ours import Ours
from perf.run import required

console = Console(width=200, highlight=False)


def specs_for(cases: list[Case], providers: list[str], gpu: str) -> list[KernelSpec]:
    """The specs that our providers among `providers` run for `cases` on a GPU, each once. ValueError for an unknown name."""
    if gpu not in PRETEND:
        raise ValueError(f"gpu: {gpu!r} is none of {', '.join(PRETEND)}")
    ours = [provider for provider in providers_of(providers) if isinstance(provider, Ours)]
    found = (provider.specs([case for case in cases if case.operation == provider.operation], PRETEND[gpu]) for provider in ours)
    return list(dict.fromkeys(spec for specs in found for spec in specs))


def main(
    folder: Annotated[Path, typer.Argument(help="Where the kernels go; made if it is missing.", file_okay=False)],
    cases: Annotated[str, typer.Option(help="Sets and globs over case names, separated by commas.")] = "throughput",
    providers: Annotated[str, typer.Option(help="Providers of this package, separated by commas.")] = "ours",
    gpu: Annotated[str, typer.Option(help=f"Any of {', '.join(PRETEND)}.")] = "h200",
    processes: Annotated[int, typer.Option(min=0, help="Kernels compiled at once; 0: as many as there are CPUs.")] = 0,
) -> None:
    """Compiles what is missing. Exit code 1 where a kernel fails; 2 for an unknown case, provider or GPU, or without any."""
    try:
        specs = specs_for(select_cases(required("cases", cases)), required("providers", providers), gpu)
        if not specs:
            raise ValueError(f"nothing to compile: {providers!r} runs no kernel of this package for {cases!r}")
    except ValueError as error:
        console.print(f"[red]{error}")
        raise typer.Exit(2) from error
    done = compile_into(Folder(folder.expanduser().absolute()), specs, processes or None)
    outcomes = [said for _, said in track(done, f"compiling {len(specs)} kernels", len(specs), console=console)]
    failed = [said for said in outcomes if said.startswith("failed")]
    for said in dict.fromkeys(failed):
        console.print(said, markup=False)
    there = outcomes.count("was there")
    before = "all from before: nothing was compiled" if there == len(specs) else f"{there} from before"
    console.print(f"{len(specs) - len(failed)} of {len(specs)} kernels are in {folder}, {before}")
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    typer.run(main)
