"""The code in the guide to processes runs, and says the same however many processes there are."""

import re
from pathlib import Path
from typing import Any

import pytest

from penstock import Plan
from tests.distributed.launch import ROOT, run


def code_of(page: str) -> str:
    """Give the code blocks of a page, one after the other."""
    text = (ROOT / "docs" / page).read_text()
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))


def test_the_code_about_checkpoints_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code_of("failure.md"), "failure.md", "exec"), {})
    assert (tmp_path / "checkpoints" / "step-1" / "state.json").is_file()


def test_the_code_about_plans_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code_of("plans.md"), "plans.md", "exec"), {})
    assert (tmp_path / "plan.json").is_file()


def test_the_page_about_clusters_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(compile(code_of("clusters.md"), "clusters.md", "exec"), found)
    assert len(found["pod"].places) == 128


def test_the_page_about_profiles_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(compile(code_of("profile.md"), "profile.md", "exec"), found)
    assert found["counted"].layers == found["here"].layers


def test_the_page_about_planning_runs() -> None:
    found: dict[str, Any] = {}
    exec(compile(code_of("planning.md"), "planning.md", "exec"), found)
    assert found["timeline"].step_s > 0


def test_the_page_about_memory_runs() -> None:
    exec(compile(code_of("memory.md"), "memory.md", "exec"), {})


def test_the_page_about_asynchronous_schedules_runs() -> None:
    found: dict[str, Any] = {}
    exec(compile(code_of("asynchronous.md"), "asynchronous.md", "exec"), found)
    assert found["losses"].shape == (6,)


def test_the_page_about_searched_schedules_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found: dict[str, Any] = {}
    exec(compile(code_of("searched.md"), "searched.md", "exec"), found)
    assert Plan.load(tmp_path / "plan.json").schedule == found["searched"]


@pytest.mark.slow
def test_the_guides_code_gives_the_same_losses_in_one_process_and_in_two(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(code_of("processes.md"))
    outputs = [run(world_size, [str(script)])[0].output for world_size in (1, 2)]
    lines = [[line for line in text.splitlines() if ": loss " in line] for text in outputs]
    assert len(lines[0]) == 10
    assert lines[0] == lines[1]
    assert all("utilisation" in text for text in outputs), "no breakdown was printed"
