"""The command line: doctor, plan, explain, compile, cache, tune, bench, demo and dashboard."""

from __future__ import annotations

import itertools
import json
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table

from . import __version__
from .api.kernels_of import Beside, specs_of
from .attention.choice import tuned
from .attention.descriptors import DecodeProblem
from .attention.plan import sku_of
from .attention.variants import explain as explain_problem
from .attention.variants import grid_of
from .attention.workspace import workspace_bytes, workspace_regions
from .bench.models import MODELS, Stored, tokens_of
from .compile.cache import ENVIRONMENT, cache_folder
from .compile.disk import Folder, Untrusted
from .errors import CuteKernelsError, InvalidArgument, MissingDependency, Unsupported
from .kv.rotary import Rotary
from .kv.types import KVDtype
from .options import Commands, Device, Dtype, Rows, Shape, check_writable, in_options, spread
from .planning.variants import DeviceFacts, Explanation, PlanPreference

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Attention over KV caches for Hopper inference backends.",
)
console = Console(highlight=False, soft_wrap=True)


class Pairs(str, Enum):
    """Which columns a rotary embedding rotates together: i with i + rotary_dim / 2, or 2 i with 2 i + 1."""

    half = "half"
    interleaved = "interleaved"


@dataclass(frozen=True)
class Request:
    """A problem on a device, as the shape options describe them. facts: of the part of the device that a plan may use."""

    problem: DecodeProblem
    operation: str | None
    facts: DeviceFacts
    preference: PlanPreference
    as_json: bool

    def explanation(self) -> Explanation:
        """Every variant's answer; nothing is compiled."""
        return explain_problem(self.problem, self.facts, self.preference)


def _shape_command(handler: Callable[[Request], None]) -> Callable[..., None]:
    """Registers `handler` as a command that takes the shape options."""

    @spread
    def command(
        *,
        batch: Annotated[int, typer.Option(help="Requests in the batch.")] = 1,
        seq_len: Annotated[int, typer.Option(help="The longest row: a hint, or a contiguous cache's length.")] = 4096,
        dtype: Annotated[Dtype, typer.Option(help="dtype of q, and of the cache unless --kv-dtype is given.")] = Dtype.bf16,
        kv_dtype: Annotated[KVDtype | None, typer.Option(help="What the cache stores; q's dtype by default.")] = None,
        shape: Shape,
        rows: Rows,
        device: Device,
        as_json: Annotated[bool, typer.Option("--json", help="Print data.")] = False,
    ) -> None:
        problem, preference = shape.problem(batch, seq_len, dtype, kv_dtype, rows), device.preference
        handler(Request(problem, rows.operation, preference.part_of(device.facts), preference, as_json))

    command.__doc__ = handler.__doc__
    return app.command(handler.__name__)(command)


@_shape_command
def plan(request: Request) -> None:
    """What would run for a shape: variant, config, workspace and numerics."""
    chosen = request.explanation().chosen
    sku = sku_of(request.problem, chosen, request.preference, request.operation)
    launch = grid_of(request.problem, chosen)
    if request.as_json:
        regions = [vars(region) for region in workspace_regions(*launch)]
        fields = {**vars(sku), "config": chosen.config and vars(chosen.config)}
        fields["precision_guarantee"] = vars(sku.precision_guarantee)
        console.print_json(json.dumps({**fields, "workspace_regions": regions}))
        return
    grid = Table.grid(padding=(0, 2))
    grid.add_row("problem", str(request.problem))
    grid.add_row("device", str(request.facts))
    for name in ("operation", "variant", "arch"):
        grid.add_row(name, getattr(sku, name))
    grid.add_row("config", _assignments(sku.config) if sku.config else "none: plain PyTorch")
    grid.add_row("workspace", f"{workspace_bytes(*launch):,} bytes")
    for region in workspace_regions(*launch):
        grid.add_row("", f"{region.name}: {region.nbytes:,} bytes at {region.offset:,}")
    grid.add_row("numerics", _assignments(sku.precision_guarantee))
    console.print(grid)


@_shape_command
def explain(request: Request) -> None:
    """Every variant for a shape and why it is taken or rejected; exit code 2 where all are. Needs no GPU: see --gpu."""
    explanation = request.explanation()
    if request.as_json:
        console.print_json(json.dumps(explanation.to_dict()))
    else:
        console.print(str(explanation), markup=False)
    if not any(candidate.verdict == "chosen" for candidate in explanation.candidates):
        raise Unsupported(["no variant serves this: the reasons are above"])


@app.command()
@spread
def compile(
    *,
    batch: Annotated[list[int], typer.Option(help="Requests in the batch; may be given several times.")] = [1],  # noqa: B006
    seq_len: Annotated[list[int], typer.Option(help="The longest row, as it is planned for; several times.")] = [4096],  # noqa: B006
    dtype: Annotated[list[Dtype], typer.Option(help="dtype of q, and of the cache; several times.")] = [Dtype.bf16],  # noqa: B006
    kv_dtype: Annotated[list[KVDtype] | None, typer.Option(help="What the cache stores; several times.")] = None,
    shape: Shape,
    rows: Rows,
    device: Device,
    append: Annotated[bool, typer.Option(help="Also what appends the batch's new tokens to such a paged cache.")] = False,
    rotary_dim: Annotated[int, typer.Option(min=0, help="Also appends that rotate so many columns of K and q; 0: none.")] = 0,
    pairing: Annotated[Pairs, typer.Option(help="Columns that --rotary-dim rotates together.")] = Pairs.half,
    merge: Annotated[list[int] | None, typer.Option(help="Also merges of so many states; several times.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder that keeps the kernels; default: the user's cache.")] = None,
    processes: Annotated[int, typer.Option(min=0, help="Kernels compiled at once; 0: as many as there are CPUs.")] = 0,
    verbose: Annotated[bool, typer.Option("--verbose", help="All that a kernel is specialised for, in its line.")] = False,
) -> None:
    """Compiles a model's kernels, for every batch size, length and type given; needs no GPU.

    A program that finds --out in its CUTE_KERNELS_CACHE runs them without the compiler.
    """
    from .compile.kernels import compile_here, compile_into

    for name, given in (("append", append), ("rotary_dim", rotary_dim)):
        if given and not shape.page_size:
            raise InvalidArgument(
                f"--{name.replace('_', '-')}", "appends are to paged caches: must be with a --page-size above 0"
            )
    stores: list[KVDtype | None] = [*kv_dtype] if kv_dtype else [None]
    problems = [shape.problem(*each, rows) for each in itertools.product(batch, seq_len, dtype, stores)]
    rotary = Rotary(pairing.value, rotary_dim, shape.heads) if rotary_dim else None
    beside = Beside(append, rotary, tuple(merge or ()))
    wanted = specs_of(problems, device.facts, device.preference, beside)
    folder = _prepared(out) if out else cache_folder()
    done = compile_into(folder, wanted, processes or None) if folder else compile_here(wanted)
    failed = 0
    with Progress(*Progress.get_default_columns(), TimeElapsedColumn(), console=console) as bar:
        task = bar.add_task(f"compiling {_kernels(len(wanted))}", total=len(wanted))
        for spec, said in done:
            failed += said.startswith("failed")
            console.print(f"{said}: {spec if verbose else short_spec(str(spec))}", markup=False)
            bar.advance(task)
    if folder is None:
        console.print(f"nothing is kept: {ENVIRONMENT} switches the user's cache off, and --out names no folder")
    else:
        verb = "is" if len(wanted) - failed == 1 else "are"
        console.print(f"{_kernels(len(wanted) - failed)} {verb} in {folder.path}", markup=False)
    raise typer.Exit(1 if failed else 0)


@app.command()
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete them all.")] = False,
    folder: Annotated[Path | None, typer.Option(help="Another folder of kernels than the user's cache.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="All that a kernel is specialised for, in its line.")] = False,
) -> None:
    """The compiled kernels on disk, the most recently used first; exit code 1 where one is damaged."""
    named = Folder(folder.expanduser().absolute()) if folder else cache_folder()
    if named is None:
        console.print(f"there is no cache: {ENVIRONMENT} switches it off")
        return
    made = named.path.exists()
    if folder and not made:
        raise InvalidArgument("folder", f"{named.path}: no such folder")
    try:
        if clear:
            count, nbytes = named.clear()
            console.print(f"deleted {_kernels(count)}, {nbytes / 2**20:.1f} MiB, from {named.path}", markup=False)
            return
        entries = named.entries()
    except (Untrusted, OSError) as error:
        raise InvalidArgument("folder", f"{named.path}: {getattr(error, 'strerror', None) or error}") from error
    for entry in entries:
        spec = entry.header["spec"] if entry.header else "damaged: it is compiled again when it is needed"
        spec = short_spec(spec) if entry.header and not verbose else spec
        size, age = f"{entry.nbytes / 1e3:.0f} KB", _age(time.time() - entry.used)
        console.print(f"{entry.key[:12]}  {size:>7}  {age:>14}  {spec}", markup=False)
    total = sum(entry.nbytes for entry in entries)
    room = f"{total / 2**20:.1f} of {named.max_bytes >> 20} MiB"
    console.print(f"{_kernels(len(entries))}, {room}, in {named.path}{'' if made else ' (not made yet)'}", markup=False)
    raise typer.Exit(0 if all(entry.header for entry in entries) else 1)


@app.command()
def doctor() -> None:
    """Versions, driver, GPUs and tuned plans, and what is missing and how to get it: exit code 1 where anything is."""
    from .doctor import Setup, variants_on

    setup = Setup.here()
    grid = Table.grid(padding=(0, 2))
    grid.add_row("cute_kernels", __version__)
    grid.add_row("python", platform.python_version())
    for package, version in setup.versions.items():
        grid.add_row(package, version or "not installed")
    grid.add_row("kernels compiled by", f"CUDA {setup.compiler}" if setup.compiler else "nothing: no compiler fits")
    grid.add_row("CUDA of torch", setup.torch_cuda or "none: a CPU build")
    if setup.driver:
        grid.add_row("NVIDIA driver", str(setup.driver))
    for index, facts in enumerate(setup.gpus):
        grid.add_row(f"cuda:{index}", f"{facts}: {', '.join(variants_on(facts)) or 'no variant'}")
    if not setup.gpus:
        grid.add_row("GPU", "none: the CPU reference runs; `explain --gpu h200` shows what a GPU would run")
    for path in sorted(tuned.plans_folder().glob("*.json")):
        count = len(tuned.load(path))
        said = "1 entry" if count == 1 else f"{count} entries"
        grid.add_row(f"plans/{path.name}", said if count else f"{said}: the cost model chooses every configuration")
    console.print(grid)
    missing = setup.missing()
    for item in missing:
        print(f"missing: {item}", file=sys.stderr)
    if missing:
        raise typer.Exit(1)
    console.print("nothing is missing")


@app.command()
def tune(
    cases: Annotated[str, typer.Option(help="Sets and globs over case names of perf, separated by commas.")] = "core",
    out: Annotated[str, typer.Option(help="Folder of the table; default: where plans are read from.")] = "",
    minutes: Annotated[float, typer.Option(min=0, help="Stop before a case that would end later than this; 0: no limit.")] = 0,
    replays: Annotated[int, typer.Option(min=15, help="Replays of each configuration that is timed in full.")] = 21,
    trials: Annotated[int, typer.Option(min=1, help="Replays of each in the trial before.")] = 3,
    memory: Annotated[float, typer.Option(help="Share of the free device memory that the caches may take.")] = 0.4,
) -> None:
    """Times configurations on this GPU; those that beat the heuristic by more than the noise go to plans/<gpu>.json.

    Runs from a checkout. Exit code 1 when a configuration gave a wrong result, 3 when --minutes left cases over.
    """
    try:
        from perf.measure import Limits
        from perf.tune import tune_cases
    except ModuleNotFoundError as error:
        need = "the tuner's clock is part of the checkout: run it there"
        raise MissingDependency(str(error.name), need) from error
    limits = Limits(replays, trials, memory_bytes=0, host_calls=0)
    raise typer.Exit(tune_cases(cases, Path(out) if out else None, minutes, limits, memory, console))


@app.command()
def bench(
    model: Annotated[str, typer.Option(help=f"One of {', '.join(MODELS)}.")] = "llama-3-8b",
    batch: Annotated[int, typer.Option(min=1, help="Requests that are decoded together.")] = 64,
    context: Annotated[str, typer.Option(help="Tokens of each, such as 8k.")] = "8k",
    page_size: Annotated[int, typer.Option(min=1, help="Tokens of a page.")] = 16,
    kv_dtype: Annotated[Stored, typer.Option(help="What the cache stores under a bf16 q.")] = Stored.bf16,
    as_json: Annotated[bool, typer.Option("--json", help="Print data.")] = False,
) -> None:
    """What this machine does a layer of a model: decode attention, the append of new tokens, a prompt. Some seconds."""
    from .bench.run import run_bench

    run_bench(model, batch, tokens_of(context), page_size, kv_dtype.eight_bit, as_json, console)


@app.command()
def demo(
    device: Annotated[str, typer.Option(help="cuda or cpu; default: the GPU where there is one.")] = "",
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to add to each prompt.")] = 120,
) -> None:
    """A small language model continues several prompts at once through plan.run, then with speculation."""
    from .demo.run import run_demo

    raise typer.Exit(run_demo(device or None, max_new_tokens))


@app.command()
def dashboard(
    out: Annotated[Path, typer.Option(help="The HTML file to write.", dir_okay=False)] = Path("dashboard.html"),
    results: Annotated[Path | None, typer.Option(help="Folder of the records; default: the checkout's perf/results.")] = None,
) -> None:
    """Writes the recorded performance as one HTML page. Runs from a checkout: the records are not installed."""
    try:
        from perf.dashboard.page import RESULTS, build
    except ModuleNotFoundError as error:
        need = "the dashboard is part of the checkout: run it there, in an environment with its dev extra (make setup)"
        raise MissingDependency(str(error.name), need) from error
    check_writable(out)
    with console.status("building the page"):
        html, page = build(RESULTS if results is None else results)
    out.write_text(html, encoding="utf-8")
    for problem in page.problems:
        print(problem, file=sys.stderr)
    console.print(f"{out}: {sum(len(gpu.cases) for gpu in page.gpus)} cases, {len(html) / 1e6:.1f} MB", markup=False)


def main() -> None:
    """Runs the command line; an error of the package is one line on stderr and exit code 2."""
    try:
        app()
    except CuteKernelsError as error:
        print(f"error: {type(error).__name__}: {in_options(error)}", file=sys.stderr)
        raise SystemExit(2) from None


def short_spec(spec: str) -> str:
    """A kernel in one short line, from the text of its spec: the fields that set it apart from most other kernels."""
    found = {name: value.strip("'") for name, value in re.findall(r"(\w+)=('[^']*'|[^',()]+)", spec)}
    of = found.get
    stored, scales = (sorted({found[n] for n in names if n in found}) for names in (("k_type", "v_type"), ("k_scale", "v_scale")))
    kind = spec.split("(")[0].removesuffix("Spec").lower().replace("kernel", "attention")
    words = {
        f"{kind} {of('arch') or of('target')}": True,
        str(of("element_type")): True,
        f"over {' and '.join(stored)}": stored not in ([], [of("element_type")]),
        f"scales {' and '.join(scales)}": scales not in ([], ["none"]),
        f"head_dim {of('head_dim')}": True,
        f"group {of('group_size')}": "group_size" in found,
        f"pages of {of('page_size')}": of("page_size") not in (None, "None", "0"),
        "contiguous": of("page_size") in ("None", "0"),
        f"{of('table_format')} table": of("table_format", "none") != "none",
        f"{of('query')} queries": of("query", "one") != "one",
        "window": "True" in (of("window_left"), of("window_right")),
        **{name: of(name) == "True" for name in ("tree_mask", "softcap", "alibi", "sinks")},
        "rotary": "rotary_dim" in found,
        f"tiles of {of('tile_n')} x {of('num_stages')}, {of('partition')}": "tile_n" in found,
    }
    return ", ".join(word for word, holds in words.items() if holds)


def _prepared(out: Path) -> Folder:
    """The folder of --out, made and found writable before anything is compiled."""
    folder = Folder(out.expanduser().absolute())
    try:
        folder.path.parent.mkdir(parents=True, exist_ok=True)
        folder.path.mkdir(mode=0o700, exist_ok=True)
        folder.entries()  # raises Untrusted
        with tempfile.TemporaryFile(dir=folder.path):
            return folder
    except (Untrusted, OSError) as error:
        raise InvalidArgument("out", f"{folder.path}: {getattr(error, 'strerror', None) or error}") from error


def _kernels(count: int) -> str:
    return "1 kernel" if count == 1 else f"{count} kernels"


def _age(seconds: float) -> str:
    """A time span in words, in the largest unit of which it has at least one."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"


def _assignments(values: object) -> str:
    return ", ".join(f"{name}={value}" for name, value in vars(values).items())
