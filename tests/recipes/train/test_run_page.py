"""The report of a run: written at its end, made anew from its folder, with what it lacks named."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from penstock import Plan
from penstock.cli.main import run
from penstock.costs.layer_facts import LayerFacts
from penstock.errors import ConfigError
from penstock.schedules import gpipe
from penstock.simulator import UNIT_COSTS, simulate
from penstock.trace.page.page import Figure, Table, write_page
from penstock_recipes.errors import RecipeError, RunFolderError
from penstock_recipes.train.command import Request, resume_run, start_run
from penstock_recipes.train.interrupt import Interrupt
from penstock_recipes.train.run_folder import RunFolder
from penstock_recipes.train.run_page import RunReader, page_of
from tests.digits import DIGITS, TWO_EPOCHS
from tests.quiet import quiet

WITH_ALL = (*TWO_EPOCHS, "train.tensorboard=true", "train.trace_every=2")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "small <b>"
    assert start_run(Request(DIGITS, WITH_ALL, folder), quiet(), Interrupt()).finished
    return folder


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    """Copy the small files of a run, to damage them."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in finished.iterdir():
        if path.suffix in (".json", ".toml", ".jsonl"):
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_a_run_ends_with_its_report(finished: Path) -> None:
    page = (finished / "report.html").read_text()
    titles = ("Timeline", "Where the time goes", "Memory", "Curves", "Plan", "Recipe")
    assert [title for title in titles if f"<h2>{title}</h2>" not in page] == []
    assert "small &lt;b&gt;" in page and "small <b>" not in page


def test_a_page_holds_what_the_run_kept(finished: Path) -> None:
    page = page_of(finished)
    facts = {fact.name: fact for fact in page.facts}
    assert facts["trained"].value == "6 steps" and "test accuracy" in facts
    step = RunReader(finished).step()
    assert step.measured is not None and step.memory is not None and step.memory.memory
    step_s = json.loads((finished / "step.json").read_text())["step_s"]
    assert 0 < step.optimizer_s < step_s
    assert step.measured.step_s + step.optimizer_s + step.set_up_s == pytest.approx(step_s)
    sections = {section.title: section for section in page.sections}
    curves = {part.title: part for part in sections["Curves"].parts if isinstance(part, Figure)}
    assert [trace["x"] for trace in curves["loss"].data] == [[1, 2, 3, 4, 5, 6], [3, 6]]
    assert len(curves["gradient norm"].data[0]["y"]) == 6
    titles = ["Curves", "Peak memory", "Plan", "Recipe", "Environment"]
    assert list(sections)[3:] == titles and not page.notes


def test_a_page_has_the_speed_of_the_model(finished: Path, copied: Path) -> None:
    facts = {fact.name: fact.value for fact in page_of(finished).facts}
    summary = json.loads((finished / "summary.json").read_text())
    counted = 2 * 3 * summary["samples_per_s"] * sum(x.num_parameters for x in plan_of(finished))
    assert summary["flops_per_s"] > counted  # a convolution uses each weight more than once
    assert facts["model FLOP/s"].endswith("FLOP/s") and "MFU" not in facts
    device = {"device": "cuda:0 (X)", "allocated_bytes": 2**30, "reserved_bytes": 2**31}
    summary |= {"mfu": 0.4321, "devices": [{**device, "total_bytes": 2**32}]}
    (copied / "summary.json").write_text(json.dumps(summary))
    page = page_of(copied)
    assert {fact.name: fact.value for fact in page.facts}["MFU"] == "43.2%"
    (memory,) = (section for section in page.sections if section.title == "Peak memory")
    table = memory.parts[-1]
    assert isinstance(table, Table)
    assert table.rows == (("cuda:0 (X)", "1 GiB", "2 GiB", "4 GiB", "50.0%"),)


def plan_of(folder: Path) -> tuple[LayerFacts, ...]:
    return Plan.from_json((folder / "plan.json").read_text()).layers


def test_the_command_renews_a_report_and_nothing_else(finished, tmp_path, capsys) -> None:
    report = finished / "report.html"
    before = report.read_text()
    assert run(["report", str(finished)]) == 0
    assert report.read_text() == before
    mine = tmp_path / "mine.html"
    mine.write_text("<!doctype html> my own page")
    assert run(["report", str(finished), "--output", str(mine)]) == 2
    assert "mine.html exists already and is no report; choose another" in capsys.readouterr().err
    assert mine.read_text() == "<!doctype html> my own page"


@pytest.mark.parametrize(("make", "what"), [(True, "holds no recipe"), (False, "does not exist")])
def test_what_is_no_run_folder_is_refused(tmp_path: Path, make: bool, what: str) -> None:
    place = tmp_path / "place"
    if make:
        place.mkdir()
    with pytest.raises(RunFolderError, match=rf"no report: .*place {what}.*; give a run folder"):
        page_of(place)


@pytest.mark.parametrize(
    "name", ["timeline.json", "plan.json", "summary.json", "environment.json", "memory.json"]
)
@pytest.mark.parametrize("text", ['{"spans": [[0, "0F', "[]", "7", "\0"])
def test_what_is_damaged_is_left_out_and_named(copied: Path, name: str, text: str) -> None:
    (copied / name).write_text(text)
    write_page(page_of(copied), copied / "report.html")
    assert f"{name} is damaged" in (copied / "report.html").read_text()


def test_a_run_without_a_timed_step_has_a_report_that_says_so(copied: Path) -> None:
    for path in copied.glob("*.json"):
        path.unlink()
    page = page_of(copied)
    assert page.notes == ("No step of this run was timed: it has made fewer than three.",)
    write_page(page_of(copied), copied / "report.html")


def test_what_was_predicted_is_shown_above(copied: Path, tmp_path: Path) -> None:
    predicted = simulate(gpipe(2, 8), UNIT_COSTS)
    (tmp_path / "predicted.json").write_text(predicted.to_json())
    reader = RunReader(copied)
    assert reader.step().predicted is None
    assert reader.step(predicted=tmp_path / "predicted.json").predicted == predicted
    (copied / "predicted.json").write_text(predicted.to_json())
    assert reader.step().predicted == predicted
    with pytest.raises(RunFolderError, match=r"--predicted: .*recipe\.toml is damaged.*; give"):
        page_of(copied, copied / "recipe.toml")


def test_without_plotly_the_run_is_kept_and_the_command_says_what_to_install(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ConfigError, match=r"needs plotly.*: pip install 'penstock\[report\]'"):
        write_page(page_of(finished), tmp_path / "other.html")
    request = Request(DIGITS, (*TWO_EPOCHS, "train.epochs=1"), tmp_path / "run")
    console = quiet()
    assert start_run(request, console, Interrupt()).finished
    assert "no report is written: the page of a report needs plotly" in written_to(console)


def written_to(console: object) -> str:
    """Return what was written to a quiet console, in one line."""
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def scalars(folder: Path) -> dict[str, list[int]]:
    """Return the steps of each scalar that TensorBoard shows of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [e.step for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_has_the_numbers_of_the_metrics(finished: Path) -> None:
    found = scalars(finished)
    steps, epochs = [1, 2, 3, 4, 5, 6], [3, 6]
    assert found == {
        "loss": steps,
        "learning_rate": steps,
        "gradient_norm": steps,
        "samples_per_s": steps,
        "train_loss": epochs,
        "test_accuracy": epochs,
    }


def test_a_resumed_run_goes_on_in_tensorboard_with_each_step_once(finished, tmp_path) -> None:
    folder = shutil.copytree(finished, tmp_path / "run")
    *_, before, newest = RunFolder(folder).checkpoints()
    assert before.name == "step-000004"
    shutil.rmtree(newest)  # steps 5 and 6 are made once more
    assert resume_run(Request(None, [], folder), quiet(), Interrupt()).finished
    assert len(list((folder / "tensorboard").iterdir())) == 2
    assert scalars(folder)["loss"] == [1, 2, 3, 4, 5, 6]


def test_tensorboard_that_is_not_installed_is_said_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(RecipeError, match=r"tensorboard, which is not installed: pip install"):
        start_run(Request(DIGITS, WITH_ALL, tmp_path / "run"), quiet(), Interrupt())
    assert not (tmp_path / "run").exists()
