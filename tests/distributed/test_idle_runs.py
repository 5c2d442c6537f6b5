"""A run whose plan leaves a process without a stage is the run that others train."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import Plan
from penstock.cli.main import run as command
from tests.distributed.launch import start
from tests.distributed.test_planned_processes import job, numbers, stopped, with_recipes
from tests.few_devices import cluster


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a recipe, another that plans itself, and far hosts of 1 + 2 devices."""
    folder = with_recipes(tmp_path_factory.mktemp("idle"))
    core: dict[str, Any] = {"flops_per_s": {"float32": 1e9, "float64": 1e9}, "bytes_per_s": 1e9}
    cluster(1, 2, near=1e11, far=1e3, torch_type="cpu", **core).save(folder / "few.toml")
    start(1, job(0, str(folder / "keys.toml"), "--run-folder", str(folder / "alone"))).wait(100)
    return folder


@pytest.mark.slow
def test_a_run_that_plans_itself_goes_on_with_an_idle_rank(here: Path) -> None:
    """Rank 0 is idle, which plans, logs and writes the page."""
    folder = here / "itself"
    began = job(2, str(here / "auto.toml"), "--cluster", str(here / "few.toml"))
    stopped(start(3, [*began, "--run-folder", str(folder)]).wait(100))
    ended = start(3, job(0, "--resume", str(folder))).wait(100)
    assert all(process.code == 0 for process in ended), ended
    assert Plan.load(folder / "plan.json").placement.idle == (0,)
    assert numbers(folder) == pytest.approx(numbers(here / "alone"), rel=0, abs=1e-12)
    page = (folder / "report.html").read_text()
    assert all(f"<h2>{title}</h2>" in page for title in ("Curves", "Environment"))
    assert "Left out" not in page


@pytest.mark.slow
def test_a_run_of_replicas_beside_an_idle_rank_is_judged_by_all_samples(here: Path) -> None:
    """Rank 0 is idle, which writes what both replicas have found."""
    wanted = ("plan", str(here / "keys.toml"), "--cluster", str(here / "few.toml"))
    many = ("--num-microbatches", "2", "--save", str(here / "plan.json"))
    assert command((*wanted, *many)) == 0
    plan = Plan.load(here / "plan.json")
    assert plan.placement.ranks == (((1, 2),),)
    placement = replace(plan.placement, ranks=(((1,), (2,)),), shard_shapes=None)
    plan = replace(plan, placement=placement, sharding=None, num_microbatches=1, why=())
    plan = replace(plan, predicted_s=None, predicted_step_s=None, predicted_stages=None)
    replace(plan, batch_norm_over_replicas=True).save(here / "replicas.json")
    folder = here / "replicas"
    began = job(0, str(here / "keys.toml"), "--plan", str(here / "replicas.json"))
    ended = start(3, [*began, "--run-folder", str(folder)]).wait(100)
    assert all(process.code == 0 for process in ended), ended
    assert numbers(folder) == pytest.approx(numbers(here / "alone"), rel=0, abs=1e-12)
