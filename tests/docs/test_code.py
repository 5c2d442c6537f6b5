"""The code on the pages for newcomers runs as it is written, and their outputs are today's."""

import json
import re
from pathlib import Path

import pytest

from tests.distributed.launch import run_python

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


RUN_PAGES = """
import json, os, sys, warnings
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.chdir(sys.argv[1])
warnings.simplefilter("ignore")
for number, (page, code) in enumerate(json.load(open("pages.json")).items()):
    os.mkdir(str(number))
    os.chdir(str(number))
    print(f"page {page}", flush=True)
    exec(compile(code, page, "exec"), {"__name__": "__main__"})
    os.chdir("..")
"""


@pytest.mark.parametrize("pages", [PAGES[1:], pytest.param(PAGES[:1], marks=pytest.mark.slow)])
def test_the_blocks_of_a_page_run_in_order_in_one_namespace(pages, tmp_path: Path) -> None:
    """Pages in one process, which imports once, each with a namespace and a folder."""
    codes = {page: "\n".join(c for info, c in blocks(page) if not info) for page in pages}
    codes = {page: code for page, code in codes.items() if code}
    (tmp_path / "pages.json").write_text(json.dumps(codes))
    done = run_python("-c", RUN_PAGES, str(tmp_path))
    assert done.code == 0, done.output
    for page in codes:
        said = done.output.partition(f"page {page}\n")[2].partition("\npage ")[0] + "\n"
        for word, _, shown in _BLOCK.findall((ROOT / page).read_text(encoding="utf-8")):
            if word == "text" and " ms" not in shown:  # times differ from run to run
                assert shown in said, page


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
