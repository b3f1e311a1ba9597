"""The page in a real browser: no errors, no requests, no sideways scrolling, a zoom that works; and `gossamer watch` as a page."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright import sync_api
from report_folders import make_plan, make_run, read_lines, write_lines

from gossamer.report.grid_page import grid_page, heading
from gossamer.report.page import write_page
from gossamer.report.serve import Live, Server

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: the page is not looked at in a browser")
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage", "--no-first-run"]
SIDEWAYS = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
CUT = """[...document.querySelectorAll('main *')].filter(e => !e.closest('.scroll, .drawing, .zoom')
    && e.getBoundingClientRect().right > innerWidth + 1).map(e => e.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield started
        started.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run, and two that are compared."""
    here = tmp_path_factory.mktemp("pages")
    one = make_plan(make_run(here / "a", rounds=12), rounds=12)
    two = make_run(here / "b", "gasloc", gossip=True, rounds=3)
    return {"one": write_page([one], here / "one.html"), "two": write_page([one, two], here / "two.html")}


class Tab:
    """A page that is open, and what it has said and asked for."""

    def __init__(self, browser: Any, url: str, width: int, **context: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 800}, **context)
        self.context.set_default_timeout(180_000)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(url)

    def close(self) -> None:
        self.context.close()


@pytest.mark.parametrize("which", ["one", "two"])
def test_a_page_fits_and_asks_for_nothing(browser: Any, pages: dict[str, Path], which: str) -> None:
    url = pages[which].as_uri()
    tab = Tab(browser, url, 1280)
    for width, scheme in ((1280, "light"), (360, "dark")):
        tab.page.set_viewport_size({"width": width, "height": 800})
        tab.page.emulate_media(color_scheme=scheme)
        tab.page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
        assert tab.page.evaluate(SIDEWAYS) <= 0, width
        assert tab.page.evaluate(CUT) == [], width
    assert tab.said == []
    assert tab.asked == [url]
    tab.page.emulate_media(media="print")
    assert not tab.page.locator(".zoom").first.is_visible(), "a canvas does not print"
    assert tab.page.locator("figure[data-key] .drawing svg").first.is_visible()
    tab.close()


def test_the_table_of_a_grid_shows_first_what_one_looks_for(browser: Any, tmp_path: Path) -> None:
    columns = [("configuration", ""), ("inner.lr", ""), ("plan.steps", ""), ("seeds", ""), ("loss", "nats"), ("±", "nats")]
    columns += [("perplexity", ""), ("time to target", "h:mm:ss"), ("total time", "h:mm:ss"), ("utilisation", "%"), ("straggler idle", "%")]
    columns += [("network idle", "%"), ("against the best", "nats")]
    numbers = ["3", "* 4.2345", "0.0123", "68.91", "0:12:33 (2 of 3)", "1:02:05", "88.1", "11.2", "0.7", "not distinguishable"]
    links = [("seed 0", "a"), ("run", "b"), ("seed 1", "c"), ("run", "d"), ("seed 2", "e"), ("run", "f")]
    rows = [([name, lr, "16", *numbers], links) for name in ("diloco", "my_methods.heavy") for lr in ("1e-3", "3e-3")]
    named = heading([cells[0] for cells, _ in rows], ["inner.lr", "plan.steps"])
    file = tmp_path / "index.html"
    file.write_text(grid_page(named, "4 rows", columns, rows, [], 2), encoding="utf-8")
    tab = Tab(browser, file.as_uri(), 1280)
    assert tab.page.title() == "diloco and my_methods.heavy by inner.lr and plan.steps · Gossamer"
    heads = [text.split(" (")[0] for text in tab.page.locator("thead th").all_text_contents()]
    assert heads[:4] == ["configuration", "loss", "±", "against the best"] and heads[-1] == "files"
    assert (
        "inner.lr = 3e-3" in tab.page.locator("tbody th").nth(1).text_content()
        and "seed 0" in tab.page.locator("tbody td").nth(10).text_content()
    )
    ends = "n => document.querySelectorAll('tbody tr:first-child > *')[n].getBoundingClientRect().right"
    box = "() => document.querySelector('.grid').getBoundingClientRect().right"
    assert tab.page.evaluate(ends, len(heads) - 1) <= tab.page.evaluate(box) + 1, "all columns are seen"
    assert not tab.page.locator(".more").is_visible()
    tab.page.set_viewport_size({"width": 390, "height": 800})
    assert tab.page.evaluate(ends, 1) <= 390 and tab.page.evaluate(SIDEWAYS) <= 0, "configuration and loss are"
    assert tab.page.locator(".more").is_visible()
    tab.close()


def test_a_page_is_whole_without_its_script(browser: Any, pages: dict[str, Path]) -> None:
    tab = Tab(browser, pages["one"].as_uri(), 360, java_script_enabled=False)
    assert tab.page.locator("figure[data-key] .drawing svg").is_visible()
    assert not tab.page.locator(".zoom").is_visible()
    assert tab.page.locator("figure[data-key] .still").is_visible()
    tab.close()


def test_the_timeline_can_be_zoomed_and_moved(browser: Any, pages: dict[str, Path]) -> None:
    tab = Tab(browser, pages["one"].as_uri(), 1280)
    canvas = tab.page.locator(".zoom canvas")
    canvas.scroll_into_view_if_needed()

    def view() -> tuple[float, float, int]:
        told = canvas.evaluate("c => [Number(c.dataset.from), Number(c.dataset.to), Number(c.dataset.drawn)]")
        return told[0], told[1], told[2]

    def press(act: str) -> None:
        tab.page.locator(f".zoom button[data-act={act}]").click()

    press("all")
    whole = view()
    assert whole[2] == sum(len(row) for row in json.loads(tab.page.locator("figure[data-key] script").text_content())["rows"]) / 4
    press("in")
    closer = view()
    assert closer[1] - closer[0] == pytest.approx((whole[1] - whole[0]) / 2)
    assert 0 < closer[2] < whole[2]
    press("right")
    assert view()[0] > closer[0]
    canvas.focus()
    tab.page.keyboard.press("0")
    assert view() == whole
    box = canvas.bounding_box()
    tab.page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 14)
    assert "in round" in tab.page.locator(".zoom output").text_content()
    tab.page.keyboard.down("Control")
    tab.page.mouse.wheel(0, -300)
    tab.page.keyboard.up("Control")
    tab.page.wait_for_function("w => { const d = document.querySelector('.zoom canvas').dataset; return d.to - d.from < w; }", arg=whole[1])
    before = view()
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 14)
    tab.page.mouse.up()
    assert view()[0] > before[0]
    assert tab.said == []
    tab.close()


def test_a_page_that_is_watched_takes_in_new_rounds_and_stays_where_it_is(browser: Any, tmp_path: Path) -> None:
    folder = make_plan(make_run(tmp_path / "a", rounds=4), rounds=9)
    (folder / "summary.json").unlink()
    records = read_lines(folder / "metrics.jsonl")
    spans = read_lines(folder / "trace.jsonl")
    write_lines(folder / "metrics.jsonl", [r for r in records if r["round"] < 2])
    write_lines(folder / "trace.jsonl", [s for s in spans if s["round"] < 2])
    server = Server(Live(folder, now_s=lambda: 0.0))  # a clock that stands still: no rest between pages
    try:
        tab = Tab(browser, server.url, 900)
        assert "round 1 of 9" in tab.page.locator(".note", has_text="Not finished").text_content()
        settings = tab.page.locator("details", has_text="All settings")
        was = settings.evaluate("d => d.open")
        settings.locator("summary").click()
        tab.page.locator(".zoom button[data-act=in]").click()
        zoomed = tab.page.locator(".zoom canvas").evaluate("c => c.dataset.to - c.dataset.from")
        tab.page.evaluate("scrollTo(0, 1500)")
        write_lines(folder / "trace.jsonl", spans)
        write_lines(folder / "metrics.jsonl", records)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"kind":"rou')
        tab.page.locator(".note", has_text="round 3 of 9").wait_for()
        assert tab.page.evaluate("scrollY") == 1500
        assert settings.evaluate("d => d.open") != was
        assert tab.page.locator(".zoom canvas").evaluate("c => c.dataset.to - c.dataset.from") == pytest.approx(zoomed)
        assert {url.removeprefix(server.url) for url in tab.asked} <= {"", "version", "favicon.ico"}
        assert tab.said == []
        tab.close()
    finally:
        server.close()
