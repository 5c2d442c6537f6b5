"""The code on the pages for newcomers runs as it is written, and their outputs are today's."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (
    *("README.md", "docs/which_schedule.md", "docs/out_of_memory.md", "docs/slow_step.md"),
    *("docs/with_x.md", "docs/coming_from.md", "docs/features.md"),
)
_BLOCK = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the Python blocks of a page: what stands after the word, and the code."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [(info.strip(), code) for word, info, code in _BLOCK.findall(text) if word == "python"]


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_page_compiles(page: str) -> None:
    found = blocks(page)
    assert found
    for info, code in found:
        compile(code, f"{page} {info}", "exec")


SLOW = "README.md"  # imports transformers and captures a model
RUN = [
    pytest.param(page, marks=pytest.mark.slow if page == SLOW else [])
    for page in PAGES
    if any(not info for info, _ in blocks(page))
]


@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run_in_order_in_one_namespace(page: str, tmp_path: Path) -> None:
    code = "\n".join(code for info, code in blocks(page) if not info)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=tmp_path,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for word, _, shown in _BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
        if word == "text" and " ms" not in shown:  # times differ from run to run
            assert shown in done.stdout


def test_all_pages_of_the_readme_exist_and_its_links_are_absolute() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    base = "https://github.com/penstock-ml/penstock/blob/main/"
    raw = "https://raw.githubusercontent.com/penstock-ml/penstock/main/"
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    assert targets
    for target in targets:
        path = target.removeprefix(base).removeprefix(raw)
        assert path != target, f"{target} is not a link that a package index can follow"
        assert (ROOT / path.partition("#")[0]).exists(), f"{target} names no file"
    assert len(text.splitlines()) <= 120
