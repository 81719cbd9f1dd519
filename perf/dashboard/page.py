"""Writes the page: a template, its style and scripts, the data and ECharts, all in one file."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import asdict
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from cute_kernels.errors import InvalidArgument, MissingDependency
from perf.cases import FLOORS
from perf.dashboard.view import FLOOR_LABELS, NOT_MEASURED, PROVIDERS, Page, page_of
from perf.record import RESULTS
from perf.records import read_records

FOLDER = Path(__file__).parent
ECHARTS = Path("node_modules", "echarts", "dist", "echarts.common.min.js")
SCRIPTS = ("state.js", "tables.js", "charts.js", "case.js", "main.js")
COLOURS = {provider: (light, dark) for provider, (_, light, dark) in PROVIDERS.items()} | dict.fromkeys(
    FLOORS, ("#9aa1a9", "#6b747e")
)


def build(results: Path = RESULTS) -> tuple[str, Page]:
    """The page of every *.jsonl in a folder as HTML, and what it shows.

    Raises InvalidArgument where the folder holds no usable record, MissingDependency where ECharts cannot be had.
    """
    paths = sorted(results.glob("*.jsonl"))
    records, problems = read_records(paths)
    try:
        page = page_of(records, problems)
    except ValueError as error:
        raise InvalidArgument("results", f"{results} holds no record of device time in its {len(paths)} *.jsonl files") from error
    return render(page, echarts()), page


def echarts(folder: Path = FOLDER) -> str:
    """The text of ECharts, installed by npm at the version that package-lock.json pins where it is not there yet."""
    path = folder / ECHARTS
    if not path.exists():
        if shutil.which("npm") is None:
            raise MissingDependency("npm", "the dashboard inlines ECharts from its npm package; install Node.js with npm")
        command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode or not path.exists():
            said = next((line for line in done.stderr.splitlines() if "error" in line), "it said nothing")
            raise MissingDependency("echarts", f"`{' '.join(command)}` in {folder} failed with {done.returncode}: {said}")
    return path.read_text(encoding="utf-8")


def render(page: Page, charts: str) -> str:
    """The HTML text of a page. charts: ECharts' script."""
    loader = FileSystemLoader(FOLDER)
    environment = Environment(
        loader=loader, autoescape=select_autoescape(["j2"]), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"us": microseconds, "times": times, "percent": percent, "rate": rate}
    return environment.get_template("page.html.j2").render(
        page=page,
        choices=choices(page),
        not_measured=NOT_MEASURED,
        style=Markup((FOLDER / "page.css").read_text(encoding="utf-8")),
        scripts=[Markup((FOLDER / name).read_text(encoding="utf-8")) for name in SCRIPTS],
        echarts=Markup(charts),
        data=Markup(json.dumps(data_of(page), allow_nan=False).replace("<", "\\u003c")),
    )


def choices(page: Page) -> dict[str, list[str]]:
    """What the filters offer, each value once, in the order of the cases."""
    cases = [case for gpu in page.gpus for case in gpu.cases.values()]
    return {name: list(dict.fromkeys(getattr(case, name) for case in cases)) for name in ("dtypes", "pages", "heads")}


def data_of(page: Page) -> dict[str, object]:
    """What the scripts read: everything that a case's dialog and the charts show."""
    return {
        gpu.slug: {
            "name": gpu.name,
            "revisions": gpu.revisions,
            "providers": {name: label for name, (label, _) in gpu.providers.items()} | FLOOR_LABELS,
            "colours": COLOURS,
            "cases": {name: asdict(case) for name, case in gpu.cases.items()},
        }
        for gpu in page.gpus
    }


def microseconds(us: float) -> str:
    return f"{us:.1f}"


def rate(tflops: float) -> str:
    """A rate as the page spells it."""
    return f"{tflops:.0f} TFLOPS"


def times(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.1f}"


def percent(ratio: float) -> str:
    """A ratio as a change, with a minus as wide as the plus: "+3.1%"."""
    return f"{100 * (ratio - 1):+.1f}%".replace("-", "\N{MINUS SIGN}")
