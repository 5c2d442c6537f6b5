"""The code and the commands in the documents run as they are written."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from PIL import Image

from penstock import Plan
from penstock.sharding.layouts import R
from tests.distributed.launch import ROOT, run


def code_of(page: str) -> str:
    """Give the code blocks of a page, one after the other."""
    text = (ROOT / "docs" / page).read_text()
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


FOUND: dict[str, Callable[[dict[str, Any]], bool]] = {
    "failure.md": lambda _: Path("checkpoints/step-1/state.json").is_file(),
    "plans.md": lambda _: Path("plan.json").is_file(),
    "clusters.md": lambda found: len(found["pod"].places) == 128,
    "profile.md": lambda found: found["counted"].layers == found["here"].layers,
    "planning.md": lambda found: found["timeline"].step_s > 0,
    "memory.md": lambda found: "pipe" in found,
    "sharding.md": lambda found: (
        found["pinned"].layers[2].weights["feed_forward.narrow.weight"] == (R,)
    ),
    "asynchronous.md": lambda found: found["losses"].shape == (6,),
    "searched.md": lambda found: Plan.load("plan.json").schedule == found["searched"],
}
"""Pages, and what their code has made where it has run."""
SLOW, SAYS = "planning.md", {"sharding.md": "more. Use more shards"}


@pytest.mark.parametrize(
    "page", [pytest.param(p, marks=pytest.mark.slow if p == SLOW else []) for p in FOUND]
)
def test_the_code_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {"__name__": "page"}
    exec(compile(code_of(page), page, "exec"), found)
    assert FOUND[page](found) and SAYS.get(page, "") in capsys.readouterr().out


@pytest.mark.slow
def test_the_guides_code_gives_the_same_losses_in_one_process_and_in_two(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(code_of("processes.md"))
    outputs = [run(world_size, [str(script)])[0].output for world_size in (1, 2)]
    lines = [[line for line in text.splitlines() if ": loss " in line] for text in outputs]
    assert len(lines[0]) == 10 and lines[0] == lines[1]
    assert all("utilisation" in text for text in outputs), "no breakdown was printed"


@pytest.mark.slow
def test_the_guides_script_trains_alike_in_one_process_and_in_two() -> None:
    """As it is, under python and under torchrun."""
    together = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    found = []
    for launcher in ((), together):
        command = [sys.executable, *launcher, "docs/finetune_gpt2.py", "LICENSE", "20"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found.append([line for line in done.stdout.splitlines() if line.startswith("step")])
    assert found[0] and found[0] == found[1]


SHORTER: dict[str, dict[str, str]] = {
    "commands.md": {
        "train digits ": "--set train.epochs=1 --set model.width=4 --set train.checkpoint_every=4",
        "train digits_amoebanet": "--set train.epochs=1 --set model.num_filters=16",
        "scale ": "--num-microbatches 2 --sharding zero1",
        "check gpt_small": "--set model.width=16 --set data.vocabulary_size=256",
    },
    "any_model.md": {"finetune_gpt2.py": "20"},
    "failure.md": {
        "train digits": "--set train.epochs=1 --set model.width=4 --set train.checkpoint_every=4"
    },
    "images.md": {
        "train digits_": "--set train.epochs=1 --set model.num_filters=16",
        "train digits ": "--set train.epochs=1",
        "--resume": "--set train.epochs=2",
    },
    "language_model.md": {"train": "--set train.epochs=1 --set data.sample_length=9"},
    "planning.md": {"scale ": "--num-microbatches 2 --sharding zero1"},
    "report.md": {"train": "--set train.epochs=1"},
    "translation.md": {
        "train": '--set train.epochs=1 --set \'data.languages=["de", "sv"]\' '
        "--set 'data.low_resource=[\"sv\"]'"
    },
}
"""Page, part of a command, and words that are added to the command to make it short."""

NOT_RUN: dict[str, dict[str, str]] = {
    "README.md": {"make ": "make installs all that it needs", "pip ": "a package registry"},
    "hosts.md": {"": "two hosts, or a cluster with Slurm"},
}
"""Page, how lines of it begin, and what they need that a test has not."""


def commands_of(page: Path) -> list[str]:
    """Return the lines of a page's sh blocks that a test can run, without their comments."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^( *)```(?:sh|bash|shell|console)\n(.*?)^\1```", text, re.S | re.M)
    lines = [line.strip() for _, block in blocks for line in block.splitlines()]
    skipped = tuple(NOT_RUN.get(page.name, ()))
    return [line for line in lines if line and not line.startswith(("#", *skipped))]


def words_of(page: str, line: str) -> list[str]:
    """Return the words of a command, with those that make it short."""
    more = [words for part, words in SHORTER.get(page, {}).items() if part in line]
    return [*shlex.split(line, comments=True), *shlex.split(" ".join(more))]


def prepare(page: Path, folder: Path) -> None:
    """Put into a folder what a page's commands take for granted."""
    shutil.copytree(ROOT / "docs" / "examples", folder / "docs" / "examples")
    shutil.copy(ROOT / "docs" / "finetune_gpt2.py", folder / "docs")
    for name in ("README.md", "FILE"):  # FILE: a text of the reader's
        shutil.copy(ROOT / "README.md", folder / name)
    (folder / "mymodel.py").write_text(MODEL_AND_EXAMPLE)
    Image.fromarray(numpy.zeros((8, 8), numpy.uint8)).save(folder / "six.png")
    if page.name == "report.md":  # its code writes the timeline that a command reads
        subprocess.run([sys.executable, "-c", code_of("report.md")], cwd=folder, check=True)
    before, found, _ = page.read_text().partition("```sh\npython train.py")
    if found:
        *earlier, script = re.findall(r"```python\n(.*?)```", before, re.DOTALL)
        (folder / "train.py").write_text(script)
        for code in earlier:
            subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)


MODEL_AND_EXAMPLE = """
import torch
from torch import nn


def example():
    layers = [nn.Linear(8, 8) for _ in range(5)]
    return nn.Sequential(*layers), torch.randn(16, 8)
"""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_COMMANDS = [page for page in PAGES if commands_of(page)]


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    prepare(page, tmp_path)
    programs = str(Path(sys.executable).parent)
    environment = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}",
    }
    for line in commands_of(page):
        # Resumed with no more epochs: as if it had ended after the checkpoint before.
        if "--resume runs/digits-1" in line and "train.epochs" not in line:
            shutil.rmtree(tmp_path / "runs/digits-1/checkpoints/step-000012")
        options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE}
        options |= {"stderr": subprocess.STDOUT, "text": True, "check": False}
        ended = subprocess.run(words_of(page.name, line), **options)
        assert ended.returncode == 0, f"{line}\n{ended.stdout}"


def test_no_word_of_what_makes_commands_short_or_leaves_them_out_is_without_use() -> None:
    texts = {page.name: page.read_text() for page in PAGES}
    for page, parts in [*SHORTER.items(), *NOT_RUN.items()]:
        assert [part for part in parts if part not in texts[page]] == []
