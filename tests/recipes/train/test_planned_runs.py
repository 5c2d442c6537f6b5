"""A run that follows a plan, and what its folder keeps of it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock import Plan, Recompute
from penstock.cli.main import run
from penstock.planner.placement import Placement
from penstock_recipes.errors import RunFolderError
from penstock_recipes.recipe.read import read_recipe
from penstock_recipes.train.command import Request, resume_run, start_run
from penstock_recipes.train.interrupt import Interrupt
from penstock_recipes.train.run_folder import RunFolder
from tests.digits import DIGITS, SMALL
from tests.few_devices import cluster
from tests.quiet import quiet
from tests.recipes.text_recipes import TEXT
from tests.runs import sets

ONE_EPOCH = (*SMALL, "train.epochs=1", "train.log_every=1")


def losses(folder: Path) -> list[Any]:
    return [line["loss"] for line in RunFolder(folder).read_metrics() if line["kind"] == "step"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "first"
    layout = ["pipeline.num_stages=3", "pipeline.schedule=one_f_one_b", "pipeline.seed=5"]
    assert start_run(Request(DIGITS, [*ONE_EPOCH, *layout], folder), quiet(), Interrupt()).finished
    return folder


def test_a_run_keeps_the_plan_by_which_it_ran(finished: Path) -> None:
    plan = Plan.load(finished / "plan.json")
    assert (plan.num_stages, plan.schedule.name, plan.seed) == (3, "one_f_one_b", 5)
    assert plan.predicted_s is not None


def test_a_run_by_the_plan_of_another_is_that_run(finished: Path, tmp_path: Path) -> None:
    wanted = Request(DIGITS, ONE_EPOCH, tmp_path / "again", finished / "plan.json")
    assert start_run(wanted, quiet(), Interrupt()).finished
    assert losses(tmp_path / "again") == losses(finished) != []
    assert (tmp_path / "again" / "plan.json").read_text() == (finished / "plan.json").read_text()
    once_more = Request(None, [], tmp_path / "again", finished / "plan.json")
    with pytest.raises(RunFolderError, match="nothing to resume"):
        resume_run(once_more, quiet(), Interrupt())


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run the command, see that it ends with exit code 2, and return the one line it says."""
    small = [word for key in ONE_EPOCH for word in ("--set", key)]
    assert run(["train", str(DIGITS), *small, *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_plans_that_cannot_be_followed_are_one_line(finished, tmp_path, capsys) -> None:
    plan, changed = finished / "plan.json", tmp_path / "changed.json"
    text = plan.read_text()
    said = refused(capsys, "--plan", str(plan), "--set", "model.width=8")
    assert "another model: the parameters of layer 0, 'stem' (Conv2d)" in said
    said = refused(capsys, "--plan", str(plan), "--set", "pipeline.num_stages=2")
    assert "--plan decides pipeline.num_stages already" in said
    assert "has 5 processes" in refused(capsys, "--plan", str(plan), "--num-processes", "5")
    changed.write_text(text[: len(text) // 2])
    assert "damaged, or no JSON" in refused(capsys, "--plan", str(changed))
    changed.write_text(text.replace('"seed"', '"sead"'))
    assert "unknown key sead" in refused(capsys, "--plan", str(changed))
    changed.write_text(json.dumps(json.loads(text) | {"tied_gradients": "summed"}))
    assert "must compute the same" in refused(capsys, "--plan", str(changed))
    own = Plan.load(plan)
    last = own.num_stages - 1
    ranks = *(((stage,),) for stage in range(last)), ((last, last + 1),)
    places = Placement(ranks, own.placement.devices)
    replace(own, placement=places, sharding="auto").save(changed)
    said = refused(capsys, "--plan", str(changed))
    assert f"is for {last + 2} ranks" in said and f"has 1 process; start {last + 2}" in said


def test_a_run_keeps_within_its_limit_and_computes_the_same(finished, tmp_path, capsys) -> None:
    asked = ("num_stages=3", "schedule=one_f_one_b", "seed=5", "partition=[4, 2, 2]")
    layout = [f"pipeline.{each}" for each in (*asked, "offload=true")]
    changes = [*layout, "pipeline.memory_limit_bytes=9"]
    said = refused(capsys, *sets(*changes))
    assert "memory_limit_bytes=9 on rank 0 (stage 0)" in said
    assert "moved away it still keeps" in said
    changes[-1] = "pipeline.memory_limit_bytes=500_000"
    wanted = Request(DIGITS, [*ONE_EPOCH, *changes], tmp_path / "limited")
    assert start_run(wanted, quiet(), Interrupt()).finished
    assert losses(tmp_path / "limited") == losses(finished) != []
    plan = Plan.load(tmp_path / "limited" / "plan.json")
    assert plan.predicted_peak_bytes is not None
    assert plan.recompute[0] is not Recompute.NEVER
    assert plan.recompute[2] is Recompute.NEVER
    assert max(plan.predicted_peak_bytes) <= 500_000


@pytest.mark.slow
def test_a_run_that_plans_itself_may_measure_its_layers_first(tmp_path: Path) -> None:
    text = TEXT.replace("PATH", str(tmp_path / "text.txt"))
    (tmp_path / "text.txt").write_text("the cat sat on the mat\n" * 400)
    (tmp_path / "gpt.toml").write_text(text.replace("num_stages = 2", 'plan = "auto"'))
    cluster(1, torch_type="cpu").save(tmp_path / "one.toml")
    changes = [
        f"pipeline.cluster={tmp_path / 'one.toml'}",
        "train.log_every=1",
        "model.num_layers=1",
    ]
    for folder in ("estimated", "measured"):
        changes.append(f"pipeline.measure={str(folder == 'measured').lower()}")
        wanted = Request(tmp_path / "gpt.toml", changes, tmp_path / folder)
        assert start_run(wanted, quiet(), Interrupt()).finished
    plans = [Plan.load(tmp_path / own / "plan.json") for own in ("estimated", "measured")]
    estimated, measured = (plan.predicted_step_s for plan in plans)
    assert estimated and measured and estimated != measured
    assert losses(tmp_path / "measured") == losses(tmp_path / "estimated") != []
    assert read_recipe(tmp_path / "measured" / "recipe.toml").pipeline.measure
