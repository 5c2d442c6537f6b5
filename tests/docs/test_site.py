"""The documentation site is complete, builds strictly, and needs no network."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

import penstock

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def hooks() -> Any:
    """Return docs/hooks.py, which lies in no package."""
    spec = spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec and spec.loader
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def shown() -> list[str]:
    text = "\n".join(page.read_text("utf-8") for page in (ROOT / "docs/reference").glob("*.md"))
    return re.findall(r"^::: (\S+)", text, re.MULTILINE)


def test_the_reference_names_each_public_name_once() -> None:
    public = [f"penstock.{name}" for name in penstock.__all__ if name != "schedules"]
    public += [f"penstock.schedules.{name}" for name in penstock.schedules.__all__]
    assert sorted(map(hooks()._public_name, shown())) == sorted(public)


@pytest.mark.slow
def test_a_name_that_is_missing_repeated_or_private_is_told() -> None:
    pytest.importorskip("griffe", reason="NOT RUN: make docs installs griffe")
    problems, names = hooks().problems, shown()
    assert problems(names) == []
    assert problems(names[1:]) == [f"{names[0]} is public and on no page"]
    assert problems([*names, names[0]]) == [f"{names[0]} appears twice"]
    (private,) = problems([*names, "penstock.errors.MeshError"])
    assert private == "penstock.errors.MeshError is on a page and not public"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_page_is_in_the_menu(page: Path) -> None:
    menu = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:\n")[2]
    name = page.relative_to(ROOT / "docs").as_posix()
    assert re.search(rf"(- |: ){re.escape(name)}$", menu, re.MULTILINE)


def build(checkout: Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)


def copy(into: Path) -> Path:
    pytest.importorskip("material", reason="NOT RUN: make docs installs mkdocs-material")
    pytest.importorskip("mkdocstrings", reason="NOT RUN: make docs installs mkdocstrings")
    left_out = shutil.ignore_patterns("site", "runs", ".*", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, into / "checkout", ignore=left_out)
    return into / "checkout"


@pytest.mark.slow
def test_the_site_builds_and_asks_no_other_site_for_anything(tmp_path: Path) -> None:
    checkout = copy(tmp_path)
    done = build(checkout)
    assert done.returncode == 0, done.stderr
    pages = list((checkout / "site").rglob("*.html"))
    assert len(pages) > len(PAGES)  # one more: 404
    loaded = re.compile(r'<(?:script|img|iframe)[^>]*\ssrc="?https?:|<link[^>]*href="?https?:')
    assert [page.name for page in pages if loaded.search(page.read_text("utf-8"))] == []


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="NOT RUN: there is no Chromium")
def test_search_finds_words_in_pages_that_are_opened_from_disk(tmp_path: Path) -> None:
    from playwright.sync_api import sync_playwright

    checkout = copy(tmp_path)
    assert build(checkout).returncode == 0
    asked: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 800})
        tab.on("request", lambda request: asked.append(request.url))
        tab.goto((checkout / "site/reference/schedules.html").as_uri())
        tab.click(".md-search__input")
        tab.keyboard.type("bubble")
        found = tab.locator(".md-search-result__link", has_text="My step is slow")
        found.first.wait_for(timeout=30_000)
        browser.close()
    assert [url for url in asked if url.startswith("http")] == []


def append(file: Path, text: str) -> None:
    file.write_text(file.read_text() + text)


def _broken_link(checkout: Path) -> None:
    append(checkout / "docs/glossary.md", "\n[away](nowhere.md)\n")


def _broken_source(checkout: Path) -> None:
    append(checkout / "docs/glossary.md", "\n[away](../nowhere.py)\n")


def _broken_anchor(checkout: Path) -> None:
    append(checkout / "docs/glossary.md", "\n[away](memory.md#nowhere)\n")


def _page_in_no_menu(checkout: Path) -> None:
    (checkout / "docs/lost.md").write_text("# Lost\n")


def _public_name_without_docstring(checkout: Path) -> None:
    file = checkout / "penstock/schedules/one_f_one_b.py"
    before, line, _ = file.read_text().rpartition('gpipe = Family("gpipe", _gpipe)\n')
    file.write_text(before + line)


FAULTS: dict[str, Callable[[Path], None]] = {
    "contains a link 'nowhere.md'": _broken_link,
    "names no file of the repository": _broken_source,
    "memory.md#nowhere": _broken_anchor,
    "lost.md": _page_in_no_menu,
    "penstock.schedules.gpipe has no docstring": _public_name_without_docstring,
}


@pytest.mark.slow
def test_each_fault_of_a_page_ends_the_build_and_is_named(tmp_path: Path) -> None:
    checkout = copy(tmp_path)
    for make in FAULTS.values():
        make(checkout)
    done = build(checkout)
    assert done.returncode != 0
    for message in FAULTS:
        assert message in done.stderr
    assert "in strict mode" in done.stdout + done.stderr
