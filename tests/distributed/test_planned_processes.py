"""A run by a plan of stages on unlike meshes, in the processes that the plan is for."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock import CheckpointReader, Plan
from penstock.cli.main import run as command
from penstock_recipes.recipe.read import read_recipe
from penstock_recipes.train.build import build_model
from penstock_recipes.train.layout import is_uneven
from penstock_recipes.train.run_folder import RunFolder
from penstock_recipes.train.tasks import build_task
from tests.distributed.launch import Ended, start
from tests.distributed.parallel_job import cluster_of
from tests.distributed.test_train_processes import faulty
from tests.recipes.text_recipes import TEXT
from tests.runs import curve

LINES = "".join(
    f"the {n} cats sat on {n * 7 % 13} mats and {n * n % 97} dogs\n" for n in range(99)
)


def job(step: int, *arguments: str) -> list[str]:
    """Give a command that trains in float64, and is told to end before a step, if it is not 0."""
    return [*faulty("double term", "0", step), "train", *arguments]


def stopped(ended: list[Ended]) -> None:
    assert all(process.code == 128 + signal.SIGTERM for process in ended), ended


def numbers(folder: Path) -> list[float]:
    return [line["loss" if line["kind"] == "step" else "valid_loss"] for line in curve(folder)]


def refused(ended: list[Ended], said: str) -> None:
    """See that each process ends with exit code 2 and one line."""
    for process in ended:
        lines = process.output.strip().splitlines()
        assert process.code == 2 and len(lines) == 1 and said in lines[0], process.output


def with_recipes(folder: Path) -> Path:
    """Put a text, a recipe of it, and another that plans itself into a folder."""
    (folder / "text.txt").write_text(LINES)
    text = TEXT.replace("PATH", str(folder / "text.txt"))
    (folder / "keys.toml").write_text(text)
    layout = "num_stages = 2\nnum_microbatches = 2"
    (folder / "auto.toml").write_text(text.replace(layout, 'plan = "auto"\nnum_microbatches = 2'))
    return folder


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a recipe, another that plans itself, and clusters."""
    folder = with_recipes(tmp_path_factory.mktemp("planned"))
    for hosts in ((1, 2), (1, 1), (2,), (1,)):
        cluster_of(*hosts).save(folder / f"{'+'.join(map(str, hosts))}.toml")
    return folder


@pytest.fixture(scope="module")
def alone(here: Path) -> Path:
    start(1, job(0, str(here / "keys.toml"), "--run-folder", str(here / "alone"))).wait(100)
    return here / "alone"


@pytest.fixture(scope="module")
def plan(here: Path) -> str:
    wanted = ("plan", str(here / "keys.toml"), "--cluster", str(here / "1+2.toml"))
    many = ("--sharding", "data", "--num-microbatches", "2", "--save", str(here / "plan.json"))
    assert command((*wanted, *many)) == 0
    return str(here / "plan.json")


@pytest.mark.slow
def test_a_plan_of_unlike_meshes_trains_goes_on_and_is_the_unsplit_run(plan, here, alone) -> None:
    folder, recipe = here / "run", str(here / "keys.toml")
    stopped(start(3, job(2, recipe, "--plan", plan, "--run-folder", str(folder))).wait(100))
    newest = RunFolder(folder).checkpoints()[-1]
    assert newest.name == "step-000002"
    run = read_recipe(here / "keys.toml")
    model, reader = build_model(run, build_task(run)).double(), CheckpointReader(newest)
    saved = reader.read_model(reader.model_names)
    model.load_state_dict(saved)
    assert all(torch.equal(saved[name], t) for name, t in model.state_dict().items())
    ended = start(3, job(0, "--resume", str(folder))).wait(100)
    assert all(process.code == 0 for process in ended), ended
    assert numbers(folder) == pytest.approx(numbers(alone), rel=0, abs=1e-12)
    placement = Plan.load(folder / "plan.json").placement
    assert placement == Plan.load(plan).placement and is_uneven(placement)


@pytest.mark.slow
def test_a_plan_with_its_first_stage_on_the_last_rank_trains_and_goes_on(here, alone) -> None:
    """In two processes, and in one, whose threads are as any plan's."""
    recipe, saved = str(here / "keys.toml"), here / "turned.json"
    wanted = ("--cluster", str(here / "1+1.toml"), "--sharding", "data", "--num-microbatches", "2")
    assert command(("plan", recipe, *wanted, "--save", str(saved))) == 0
    plan = Plan.load(saved)
    assert plan.placement.ranks == (((0,),), ((1,),))
    turned = replace(plan.placement, ranks=(((1,),), ((0,),)), stage_places=(0, 1))
    replace(plan, placement=turned).save(saved)
    for count in (2, 1):
        folder = here / f"turned_{count}"
        began = job(2, recipe, "--plan", str(saved), "--run-folder", str(folder))
        stopped(start(count, began).wait(100))
        ended = start(count, job(0, "--resume", str(folder))).wait(100)
        assert all(process.code == 0 for process in ended), ended
        assert numbers(folder) == pytest.approx(numbers(alone), rel=0, abs=1e-12)
        assert count == 1 or Plan.load(folder / "plan.json").placement == turned


@pytest.mark.slow
def test_other_processes_or_another_model_are_refused_by_each(plan: str, here: Path) -> None:
    train = ["-m", "penstock", "train", str(here / "keys.toml"), "--plan", plan]
    said = "the plan is for 3 ranks, 3 for each replica, and this job has 2 processes; start 3"
    refused(start(2, train).wait(60), said)
    other = start(3, [*train, "--set", "model.width=32"]).wait(60)
    refused(other, "the plan is of another model: the parameters of layer 0")


@pytest.mark.slow
def test_a_run_that_plans_itself_goes_on_with_fewer_processes(here: Path, alone: Path) -> None:
    folder = here / "itself"
    cluster = ("--cluster", str(here / "1+2.toml"))
    began = job(2, str(here / "auto.toml"), *cluster, "--run-folder", str(folder))
    stopped(start(3, began).wait(100))
    again = ("--resume", str(folder), "--cluster")
    stopped(start(2, job(4, *again, str(here / "2.toml"))).wait(100))
    (ended,) = start(1, job(0, *again, str(here / "1.toml"))).wait(100)
    assert ended.code == 0, ended.output
    assert numbers(folder) == pytest.approx(numbers(alone), rel=0, abs=1e-12)
    files = sorted((folder / "plans").iterdir())
    assert [file.name for file in files] == [
        *("001-step-000000.json", "002-step-000002.json", "003-step-000004.json")
    ]
    plans = list(map(Plan.load, files))
    assert [plan.placement.num_ranks for plan in plans] == [3, 2, 1]
    assert is_uneven(plans[0].placement)
    assert files[-1].read_text() == (folder / "plan.json").read_text()
    run = read_recipe(folder / "recipe.toml").pipeline
    assert (run.plan, run.cluster, run.planned_microbatches) == ("auto", str(here / "1.toml"), 2)


@pytest.mark.slow
def test_a_cluster_that_cannot_be_is_one_line(here: Path) -> None:
    train = ["-m", "penstock", "train", str(here / "auto.toml"), "--cluster"]
    said = "the cluster few has 3 devices, and there are 2 processes; start one for each device"
    refused(start(2, [*train, str(here / "1+2.toml")]).wait(60), said)
    small = here / "small.toml"
    small.write_text((here / "2.toml").read_text().replace("1073741824", "1000"))
    said = "no stages fit: those that need least lack "
    refused(start(2, [*train, str(small)]).wait(60), said)
