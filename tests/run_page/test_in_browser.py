"""The page in a real browser loads without errors and requests, shows all points, and can be used."""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.run_page.test_report import data_of, train

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs a browser: chromium")

STEPS = 40


@pytest.fixture(scope="module")
def page_file(tmp_path_factory) -> Path:
    _, report = train(tmp_path_factory.mktemp("page") / "run.html", steps=STEPS, bad=(20, 21, 22), clip=0.3)
    return report.path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox", "--disable-gpu"])
        yield started
        started.close()


class Opened:
    """An opened page, with its console messages and requests."""

    def __init__(self, browser: Any, file: Path, *, width: int = 1200, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.asked: list[str] = []
        self.page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(file.as_uri())
        self.page.wait_for_function("document.documentElement.dataset.drawn", timeout=60_000)


@pytest.fixture
def opened(browser, page_file) -> Iterator[Opened]:
    page = Opened(browser, page_file)
    yield page
    page.context.close()


@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1200, "dark")])
def test_it_loads_without_errors_or_requests_and_fits(browser, page_file, width, scheme):
    opened = Opened(browser, page_file, width=width, scheme=scheme)
    # Altair 5, the last release for Python 3.10, writes charts for the Vega-Lite before the one of vl-convert.
    older = [text for text in opened.said if re.match(r"warning: The input spec uses Vega-Lite v5\b", text)]
    assert opened.said == (older if sys.version_info < (3, 11) else [])
    assert opened.asked == [page_file.as_uri()]
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    backs = {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}
    assert opened.page.evaluate("getComputedStyle(document.body).backgroundColor") == backs[scheme]
    opened.context.close()


def test_the_plots_have_their_points(opened, page_file):
    count = "document.querySelectorAll('#chart-{} .mark-symbol.role-mark path').length"
    curves = data_of(page_file)["curves"]
    assert curves["step"][-1] == STEPS
    assert opened.page.evaluate(count.format("scale")) == STEPS + 3  # plus one mark per skipped step
    known = sum(value is not None for value in (*curves["before"], *curves["after"]))
    assert opened.page.evaluate(count.format("norm")) == known + 3
    assert opened.page.evaluate(count.format("loss")) == STEPS - 3 + 3
    for name in ("bits", "zeros"):
        drawn = """name => { const canvas = document.querySelector(`#chart-${name} canvas`);
            const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
            return new Set(Array.from({ length: data.length / 4 }, (_, i) => data.slice(4 * i, 4 * i + 3).join())).size; }"""
        assert opened.page.evaluate(drawn, name) > 10


def test_charts_have_names_for_screen_readers(opened):
    labels = opened.page.evaluate(
        "[...document.querySelectorAll('#chart-scale [aria-label]')].map(node => node.getAttribute('aria-label'))"
    )
    assert any(label.startswith("X-axis titled 'optimizer step'") for label in labels)
    named = "document.getElementById(document.querySelector('#chart-scale').getAttribute('aria-labelledby')).textContent"
    assert opened.page.evaluate(named) == "Loss scale"
    assert any("step: 21" in label and "not finite: " in label for label in labels), labels


def test_hovering_shows_values(opened):
    mark = opened.page.locator("#chart-scale .mark-symbol path[aria-label*='skipped step: 21']")
    mark.scroll_into_view_if_needed()
    mark.hover()
    tip = opened.page.locator("#vg-tooltip-element.visible")
    tip.wait_for()
    for part in ("skipped step", "21", "loss scale", "256", "nan in 6 gradients: 4.bias"):
        assert part in tip.inner_text()


def test_the_copy_button_copies(opened):
    button = opened.page.locator("[data-copy]").first
    code = opened.page.locator(".cure + pre").first.inner_text()
    button.focus()
    opened.page.keyboard.press("Enter")
    opened.page.wait_for_function("document.querySelector('[data-copy]').textContent === 'Copied'")
    assert opened.page.evaluate("navigator.clipboard.readText()").strip() == code.strip()
    assert code.strip()
