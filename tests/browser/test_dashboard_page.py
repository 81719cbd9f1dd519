"""The dashboard as a reader meets it, in headless Chromium: it loads, filters, opens a case, and follows a link."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from perf.dashboard.page import build
from tests.support.dashboard_records import (
    CASES,
    EIGHT_BIT,
    HALF,
    PROMPT,
    RAGGED,
    SCRIPT,
    SPREAD,
    VERIFY,
    make_attention_results,
    make_long_results,
    make_results,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

playwright = pytest.importorskip("playwright.sync_api")  # with no browser test left, `make browser-test` fails
expect = playwright.expect
expect.set_options(timeout=15_000)

pytestmark = pytest.mark.browser
NAMES = ("chromium", "chromium-browser", "google-chrome")
# as root in a sandbox, and silent towards the network
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
WIDE, PHONE = (1400, 900), (400, 800)
RECORDED = len(CASES) + 2


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, NAMES)), None)
    if path is None:
        pytest.fail(f"a browser test needs one of {', '.join(NAMES)} on PATH; without: -m 'not browser'")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return page_at(make_results(tmp_path_factory.mktemp("page")))


def page_at(results: Path) -> str:
    """The address of the page of a folder's records, beside them."""
    html, _ = build(results)
    (results / "page.html").write_text(html, encoding="utf-8")
    return (results / "page.html").as_uri()


Open = Callable[..., "Page"]


@pytest.fixture
def visit(browser: Browser, url: str) -> Iterator[Open]:
    """Opens the page at an address' hash. At the end: nothing was logged, raised, or asked of the network."""
    complaints: list[str] = []
    contexts = []

    def go(hash: str = "gpu=nvidia-h200", size: tuple[int, int] = WIDE, scheme: str = "light") -> Page:
        context = browser.new_context(viewport={"width": size[0], "height": size[1]}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(15_000)
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(f"error: {error}"))
        page.on("request", lambda request: complaints.append(request.url) if request.url.startswith("http") else None)
        page.on("dialog", lambda alert: complaints.append(f"alert: {alert.message}"))
        page.goto(f"{url}#{hash}")
        return page

    yield go
    for context in contexts:
        context.close()
    assert complaints == []


def cells(page: Page) -> Locator:
    """The cases that the heat map shows."""
    return page.locator(".gpu:not([hidden]) .heat button:visible")


def control(page: Page, name: str) -> Locator:
    """A filter."""
    return page.locator(f"#filters [name={name}]")


def dialog(page: Page) -> Locator:
    return page.locator("dialog")


def expect_painted(page: Page, selector: str) -> None:
    """Wait until a chart's canvas holds more than a few colours: one that drew nothing has one, and bare axes few."""
    script = """selector => {
        const canvas = document.querySelector(selector + " canvas");
        const pixels = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
        return new Set(pixels).size > 3;
    }"""
    page.wait_for_function(script, arg=selector)


def test_it_loads_with_nothing_to_complain_of(visit: Open) -> None:
    page = visit("")
    expect(page.locator(".gpu:visible")).to_have_attribute("data-gpu", "nvidia-h200")
    expect(cells(page)).to_have_count(RECORDED)
    expect(page.locator(".problems")).to_contain_text("h200.jsonl:25: truncated")
    expect(page.locator(".card.alert")).to_contain_text("1 of 6")
    expect_painted(page, ".gpu[data-gpu=nvidia-h200] .overview")


def test_filters_narrow_every_part_and_land_in_the_address(visit: Open) -> None:
    page = visit()
    control(page, "dtypes").select_option("f16")
    expect(cells(page)).to_have_count(1)
    expect(page.locator("#count")).to_contain_text(f"1 of {RECORDED} recorded cases; 0 in the table")
    expect(page.locator(".gpu:not([hidden]) .empty")).to_be_visible()
    assert "dtypes=f16" in page.url
    page.get_by_role("button", name="Clear").click()
    expect(cells(page)).to_have_count(RECORDED)
    control(page, "bar").select_option("missed")
    expect(cells(page)).to_have_count(1)
    expect(page.locator(".gpu:not([hidden]) .peers tbody tr:visible")).to_have_count(1)
    control(page, "bar").select_option("")
    control(page, "lengths").select_option("ragged")
    expect(cells(page)).to_have_count(2)
    control(page, "q").fill("31x4k")
    expect(cells(page)).to_have_count(1)
    control(page, "q").fill("no such case")
    expect(cells(page)).to_have_count(0)


def test_cases_without_peers_are_a_choice_away(visit: Open) -> None:
    page = visit()
    rows = page.locator(".gpu:not([hidden]) .peers tbody tr:visible")
    expect(rows).to_have_count(2)
    page.locator(".gpu:not([hidden])").get_by_label("also cases where no peer was measured").check()
    expect(rows).to_have_count(RECORDED)
    expect(rows.filter(has_text="64 x 1-8k")).to_contain_text("not measured")
    assert "unpeered=1" in page.url


def test_what_a_peer_cannot_do_is_said(visit: Open) -> None:
    page = visit()
    rows = page.locator(".gpu:not([hidden]) .peers tbody tr:visible")
    row = rows.filter(has_text="bf16, pages of 16")
    expect(row).to_contain_text(f"not supported: {SCRIPT}")  # as text: nothing of a record runs
    expect(row).to_contain_text("3.00 of PyTorch's error‡")
    expect(row).to_contain_text("1.40\N{MULTIPLICATION SIGN} at first")
    expect(row).to_contain_text("ours not measured in this run")
    expect(row).to_contain_text("in stream 138.0 (1.20\N{MULTIPLICATION SIGN})")
    eight_bit = rows.filter(has_text="e4m3")
    expect(eight_bit.locator('[data-label="FlashAttention-3"]')).to_contain_text(
        "rel. error 2.3e-02†"
    )  # by a gate of sampled rows
    expect(eight_bit.locator(".ours")).to_contain_text(re.compile(r"rel\. error 1\.7e-03$|rel\. error 1\.7e-03\s"))


def test_a_cell_without_a_ratio_is_no_best_one(visit: Open) -> None:
    """Its colour is a pattern, which the legend names; the best ratio is nearly white."""
    page = visit()
    background = "element => getComputedStyle(element).backgroundImage"
    unrated = cells(page).and_(page.locator(".unrated"))
    expect(unrated).to_have_count(1)
    expect(unrated).to_have_attribute("data-open", SPREAD.name)
    assert (
        "gradient" in unrated.evaluate(background) and cells(page).filter(has_text="1.050").first.evaluate(background) == "none"
    )
    legend = page.locator(".gpu:not([hidden]) .legend")
    expect(legend).to_contain_text("limit not timed")
    assert "gradient" in legend.locator(".unrated").evaluate(background)


def test_missed_bars_are_a_link_away(visit: Open) -> None:
    page = visit()
    page.get_by_role("link", name="1 missed").click()
    expect(cells(page)).to_have_count(1)
    expect(control(page, "bar")).to_have_value("missed")
    assert "bar=missed" in page.url


def test_no_text_is_cut(visit: Open) -> None:
    """Words of the table stay whole in a narrow window, and cells of the heat map are as high as what they say."""
    page = visit("gpu=nvidia-h200&unpeered=1", size=(700, 900))
    cell = cells(page).first
    cell.evaluate("cell => cell.innerHTML += '<br>a second line<br>a third one'")
    assert cell.evaluate(
        """cell => {
            const text = document.createRange();
            text.selectNodeContents(cell);
            const [inner, outer] = [text.getBoundingClientRect(), cell.getBoundingClientRect()];
            return inner.top >= outer.top && inner.bottom <= outer.bottom;
        }"""
    )
    broken = """heads => heads.filter(head => {
        const style = getComputedStyle(head), pen = document.createElement("canvas").getContext("2d");
        pen.font = style.font;
        const room = head.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight);
        return head.firstChild.textContent.trim().split(/\\s+|(?<=-)/).some(word => pen.measureText(word).width > room + 1);
    }).length"""
    assert page.locator(".gpu:not([hidden]) .peers thead th").evaluate_all(broken) == 0


def test_a_case_opens_with_results_history_and_samples(visit: Open) -> None:
    page = visit()
    cells(page).filter(has_text="1.103").click()
    expect(dialog(page)).to_be_visible()
    expect(dialog(page).locator("h2")).to_have_text("64 x 8k, 32/8/128, bf16, pages of 16")
    expect(dialog(page)).to_contain_text("bar 1.06: missed")
    expect(dialog(page)).to_contain_text("third after second: cute_kernels +5.0% slower")
    expect(dialog(page)).to_contain_text(f"not supported: {SCRIPT}")
    expect(dialog(page)).to_contain_text("h200.jsonl:27")
    expect(dialog(page).locator('[data-label="in a stream"]').filter(has_text="138.0")).to_contain_text(
        "1.20\N{MULTIPLICATION SIGN}"
    )
    expect(dialog(page).locator('[data-label="behind weights"]').filter(has_text="174.0")).to_contain_text(
        "1.50\N{MULTIPLICATION SIGN}"
    )
    expect_painted(page, "#case-history")
    expect_painted(page, "#case-samples")
    dialog(page).get_by_role("button", name="us", exact=True).click()
    expect_painted(page, "#case-history")
    page.go_back()
    expect(dialog(page)).to_be_hidden()
    assert "case=" not in page.url


def test_percentiles_without_samples_are_stated(visit: Open) -> None:
    page = visit(f"gpu=nvidia-h200&case={SPREAD.name}")
    expect(dialog(page)).to_contain_text("samples not recorded")
    expect(dialog(page)).to_contain_text("no bar")


def test_a_link_shows_what_its_sender_saw(visit: Open) -> None:
    sender = visit()
    control(sender, "heads").select_option("8/1/128")
    cells(sender).filter(has_text="1.050").click()
    expect(dialog(sender)).to_be_visible()
    page = visit(sender.url.split("#")[1])
    expect(dialog(page).locator(".name")).to_have_text(RAGGED.name)
    dialog(page).get_by_role("button", name="Close").click()
    expect(cells(page)).to_have_count(2)
    expect(control(page, "heads")).to_have_value("8/1/128")


def test_a_link_to_a_case_that_is_gone_says_so(visit: Open) -> None:
    page = visit("gpu=nvidia-h200&case=gone")
    expect(page.locator("#count")).to_contain_text("gone is not recorded")
    expect(dialog(page)).to_be_hidden()


def test_everything_works_by_keyboard(visit: Open) -> None:
    page = visit()
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    for _ in range(3):
        page.keyboard.press("Tab")
    expect(control(page, "gpu")).to_be_focused()
    page.keyboard.press("Tab")
    page.keyboard.press("f")  # a select takes the first letter of its options
    expect(control(page, "dtypes")).to_have_value("f16")
    cells(page).first.focus()
    page.keyboard.press("Enter")
    expect(dialog(page).locator(".name")).to_have_text(HALF.name)
    for _ in range(6):  # the focus stays in the dialog, or goes to the browser
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement === document.body || document.activeElement.closest('dialog') !== null")
    page.keyboard.press("Escape")
    expect(dialog(page)).to_be_hidden()
    expect(cells(page).first).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_scrolls_in_one_direction(visit: Open, scheme: str) -> None:
    page = visit(size=PHONE, scheme=scheme)
    expect(page.locator("html")).to_have_attribute("data-theme", scheme)
    wide = "element => element.scrollWidth > element.clientWidth"
    assert not page.locator("html").evaluate(wide)
    expect(cells(page)).to_have_count(RECORDED)
    cells(page).filter(has_text="e4m3").click()
    expect(dialog(page).locator(".name")).to_have_text(EIGHT_BIT)
    assert not dialog(page).evaluate(wide)


def test_the_theme_can_be_chosen(visit: Open) -> None:
    page = visit()
    background = "element => getComputedStyle(element).backgroundColor"
    light = page.locator("body").evaluate(background)
    page.get_by_role("button", name="Switch between light and dark").click()
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")
    assert page.locator("body").evaluate(background) != light


def test_several_query_rows_and_modifiers(visit: Open, tmp_path: Path) -> None:
    page = visit()
    page.goto(page_at(make_attention_results(tmp_path)))
    expect(cells(page)).to_have_count(2)
    expect(page.locator(".card.alert")).to_have_count(0)
    rows = page.locator(".gpu:not([hidden]) .peers tbody tr:visible")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("q4")
    expect(rows.locator('[data-label="our plain decode"]')).to_contain_text("0.97\N{MULTIPLICATION SIGN}")
    for value, count in (("met", 1), ("missed", 0), ("none", 1), ("", 2)):
        control(page, "bar").select_option(value)
        expect(cells(page)).to_have_count(count)
    cells(page).filter(has_text="1.051").click()
    expect(dialog(page).locator("h2")).to_contain_text("64 x 8k, 32/8/128, bf16, pages of 16")
    expect(dialog(page).locator(".name")).to_have_text(VERIFY.name)
    expect(dialog(page)).to_contain_text("bar 1.05 x ours-plain, flashinfer-fa2: met")
    expect_painted(page, "#case-samples")


def test_long_queries_have_rates_and_the_loops_as_the_limit(browser: Browser, tmp_path: Path) -> None:
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(page_at(make_long_results(tmp_path)))
    page.locator(".heat [data-case] button").click()
    shown = dialog(page)
    expect(shown.locator(".name")).to_have_text(PROMPT.name)
    expect(shown.locator("thead")).to_contain_text("TFLOPS, ratio to wgmma")
    for who, said in (
        ("cute_kernels", "550 TFLOPS 1.250"),
        ("WGMMA loop", "687 TFLOPS 1.000"),
        ("our plain decode", "not measured"),
    ):
        row = shown.locator("tbody tr").filter(has=page.get_by_role("rowheader", name=who))
        expect(row.locator('[data-label="ratio to wgmma"]')).to_have_text(said)
    expect(shown.locator('[data-metric="ratio"]')).to_have_text("TFLOPS")
    series = page.evaluate("charts.get(document.getElementById('case-history')).getOption().series")
    drawn = {one["name"]: [round(point["value"][1]) for point in one["data"]] for one in series}
    assert drawn == {"cute_kernels": [524, 550], "flash-attn-4": [500], "WGMMA loop": [687]}
    lines = {one["name"]: round(one["markLine"]["data"][0]["yAxis"]) for one in series if "markLine" in one}
    assert lines == {"WGMMA loop": 687}
    shown.locator('[data-metric="us"]').click()
    assert len(page.evaluate("charts.get(document.getElementById('case-history')).getOption().series")) > len(drawn)
    assert not errors
    page.close()
