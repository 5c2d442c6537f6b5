"""A page in headless Chromium: it draws, zooms, asks nothing of the network, and prints."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, sync_playwright
from playwright.sync_api import Page as Tab

from penstock.trace.page import Page, Step, render_page, with_step
from tests.trace.page.pages import full_page, large_step

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None, reason="NOT RUN: there is no Chromium (apt-get install chromium)"
    ),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # In a container Chromium cannot make a sandbox of its own; the page is ours.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(render_page(full_page()), encoding="utf-8")
    return path


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    context = browser.new_context(color_scheme="light")
    yield context
    context.close()


def opened(context: BrowserContext, path: Path, width: int = 1280) -> tuple[Tab, list[str]]:
    """Open a page; return it with the list of its complaints and of its requests."""
    tab, said = context.new_page(), list[str]()
    tab.set_viewport_size({"width": width, "height": 900})
    tab.on("console", lambda message: said.append(f"{message.type}: {message.text}"))
    tab.on("pageerror", lambda error: said.append(f"error: {error}"))
    tab.on("request", lambda request: said.append(f"request: {request.url}"))
    tab.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
    tab.goto(path.as_uri())
    tab.wait_for_selector("html[data-ready]")
    return tab, said


def shown_s(tab: Tab) -> float:
    """Return how much time the axis of the timeline shows, in its unit."""
    script = "document.querySelector('[data-figure=timeline]').layout.xaxis.range"
    first, last = tab.evaluate(script)
    return float(last - first)


def box_of(place: Locator) -> Any:
    place.scroll_into_view_if_needed()
    return place.bounding_box()


def drag(tab: Tab, *, shift: bool = False) -> None:
    """Drag over the middle half of the timeline."""
    box = box_of(tab.locator("[data-figure=timeline] .nsewdrag").first)
    height = box["y"] + box["height"] / 2
    if shift:
        tab.keyboard.down("Shift")
    tab.mouse.move(box["x"] + box["width"] * 0.25, height)
    tab.mouse.down()
    tab.mouse.move(box["x"] + box["width"] * 0.75, height, steps=8)
    tab.mouse.up()
    if shift:
        tab.keyboard.up("Shift")


def test_all_charts_are_drawn_without_a_complaint_or_a_request(context, written) -> None:
    tab, said = opened(context, written)
    assert said == [f"request: {written.as_uri()}"]
    assert tab.locator(".chart").count() == tab.locator(".chart .main-svg:first-child").count() > 5
    num_boxes = tab.locator("[data-figure=timeline] .bars .point path").count()
    assert num_boxes >= 2 * 3 * 6 * 2


def test_dragging_zooms_shift_moves_and_a_double_click_goes_back(context, written) -> None:
    tab, said = opened(context, written)
    whole = shown_s(tab)
    drag(tab)
    assert shown_s(tab) == pytest.approx(whole / 2, rel=0.05)
    drag(tab, shift=True)
    assert shown_s(tab) == pytest.approx(whole / 2, rel=0.05)
    for _ in range(5):  # on a busy machine two clicks may be seen as one and one
        box_of(tab.locator("[data-figure=timeline] .nsewdrag").first)
        tab.locator("[data-figure=timeline] .nsewdrag").first.dblclick()
        tab.wait_for_timeout(1000)
        if shown_s(tab) == pytest.approx(whole, rel=0.02):
            break
    assert shown_s(tab) == pytest.approx(whole, rel=0.02)
    assert len(said) == 1


def test_keys_zoom_and_move_the_charts_of_a_step_together(context, written) -> None:
    tab, said = opened(context, written)
    whole = shown_s(tab)
    tab.locator("[data-figure=timeline]").focus()
    tab.keyboard.press("+")
    assert shown_s(tab) == pytest.approx(whole / 2)
    start = "document.querySelector('[data-figure=timeline]').layout.xaxis.range[0]"
    before = tab.evaluate(start)
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate(start) == pytest.approx(before + whole / 8)
    memory = start.replace("timeline", "memory-predicted")
    tab.wait_for_function(f"Math.abs({memory} - {start}) < 1e-6")
    tab.keyboard.press("-")
    assert shown_s(tab) == pytest.approx(whole) and tab.evaluate(start) == 0
    tab.keyboard.press("+")
    tab.keyboard.press("0")
    assert shown_s(tab) == pytest.approx(whole)
    assert len(said) == 1


def test_curves_have_a_log_scale_and_smoothing(context, written) -> None:
    tab, said = opened(context, written)
    chart = "document.querySelector('[data-figure=\"curve loss\"]')"
    tab.locator(".log").check()
    tab.wait_for_function(f"{chart}.layout.yaxis.type === 'log'")
    tab.locator(".smooth").fill("0.8")
    tab.wait_for_function(f"{chart}.data.length === 4")
    raw, smooth = (tab.evaluate(f"{chart}.data[{n}].y") for n in (0, 2))
    assert smooth[0] == raw[0] and smooth[-1] > raw[-1]  # the mean of a falling curve is above it
    tab.locator(".log").uncheck()
    tab.locator(".smooth").fill("0")
    tab.wait_for_function(f"{chart}.data.length === 2 && {chart}.layout.yaxis.type === 'linear'")
    assert len(said) == 1


def test_a_table_says_that_it_scrolls_only_where_it_does(context, written) -> None:
    tab, _ = opened(context, written, 1280)
    assert tab.locator(".scroll:visible").count() == 0
    tab.set_viewport_size({"width": 390, "height": 900})
    tab.wait_for_selector(".scroll:visible")
    assert tab.locator(".wide[tabindex]").count() == tab.locator(".scroll:visible").count()


def test_a_box_says_what_it_is_when_pointed_at(context: BrowserContext, written: Path) -> None:
    tab, _ = opened(context, written)
    box = box_of(tab.locator("[data-figure=timeline] .bars .point path").first)
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=3)
    hover = tab.locator("[data-figure=timeline] .hoverlayer .hovertext")
    hover.wait_for()
    assert "forward, stage 0, micro-batch 0" in (hover.text_content() or "")
    assert "10 ms from 0" in (hover.text_content() or "")


def test_dark_and_light_follow_the_system_until_someone_chooses(context, written) -> None:
    tab, said = opened(context, written)
    ground = "getComputedStyle(document.body).backgroundColor"
    light = tab.evaluate(ground)
    tab.emulate_media(color_scheme="dark")
    tab.wait_for_selector("html[data-theme=dark]")
    assert tab.evaluate(ground) != light
    drag(tab)
    zoomed = shown_s(tab)
    tab.click("#theme")
    assert tab.evaluate(ground) == light
    assert shown_s(tab) == pytest.approx(zoomed)
    tab.reload()
    tab.wait_for_selector("html[data-ready][data-theme=light]")
    assert {line.split(":")[0] for line in said} == {"request"}


@pytest.mark.parametrize("width", [390, 1280, 2560])
def test_nothing_is_wider_than_the_window(context, written, width) -> None:
    tab, _ = opened(context, written, width)
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_it_prints_in_light_colours_and_comes_back(context: BrowserContext, written: Path) -> None:
    tab, said = opened(context, written)
    tab.emulate_media(color_scheme="dark")
    tab.wait_for_selector("html[data-theme=dark]")
    paper = tab.pdf(prefer_css_page_size=True, print_background=True)
    assert paper.startswith(b"%PDF") and paper.count(b"/Type /Page\n") <= 12
    assert tab.evaluate("document.documentElement.dataset.theme") == "dark"
    assert len(said) == 1


def test_a_thousand_ranks_are_drawn_too(context: BrowserContext, tmp_path: Path) -> None:
    path = tmp_path / "large.html"
    page = with_step(Page("large"), Step(measured=large_step()))
    path.write_text(render_page(page), encoding="utf-8")
    tab, said = opened(context, path)
    assert len(said) == 1
    assert tab.locator("[data-figure=timeline] .bars .point path").count() > 24
