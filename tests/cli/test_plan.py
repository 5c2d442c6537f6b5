"""`penstock plan`: a plan for a cluster, with the candidates that lost and why."""

import json
from pathlib import Path

import pytest

from penstock.cli.main import run
from penstock.costs.profile import Profile
from penstock.planner.plan import Plan
from penstock.schedules import one_f_one_b
from penstock.trace import Timeline
from tests.few_devices import cluster as few_devices
from tests.profiles import chain, cluster
from tests.recipes.text_recipes import TEXT

ROOT = Path(__file__).parents[2]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder of its own, with a recipe whose text is not there."""
    monkeypatch.chdir(tmp_path)
    Path("gpt.toml").write_text(TEXT.replace("PATH", "none.txt"))


@pytest.fixture
def files() -> tuple[str, ...]:
    chain([1.0, 2.0, 1.0, 1.0]).save("model.json")
    cluster(2).save("here.toml")
    return ("plan", "--profile", "model.json", "--cluster", "here.toml", "--batch-size", "8")


def test_a_table_says_why_each_candidate_loses(files: tuple[str, ...], capsys: Captured) -> None:
    assert run(files) == 0
    said = capsys.readouterr().out
    assert "the least of" in said and "why it is not the best" in said
    assert "slower: " in said


def test_a_plan_that_is_saved_can_be_read_and_was_predicted(files, capsys) -> None:
    assert run((*files, "--save", "plan.json", "--json")) == 0
    plan = Plan.load("plan.json")
    assert plan == Plan.from_json(capsys.readouterr().out)
    told = Timeline.from_json(Path("plan.predicted.json").read_text())
    assert plan.predicted_step_s is not None
    assert 0 < told.step_s <= plan.predicted_step_s


@pytest.mark.parametrize(
    ("num_replicas", "how"),
    [
        ("1", 'by: penstock.Pipeline(model, plan=penstock.Plan.load("plan.json"), ...)'),
        ("2", 'by: penstock.Pipeline(model, plan=penstock.Plan.load("plan.json"), ...), in 2 p'),
    ],
)
def test_a_plan_that_is_saved_says_how_it_is_run(files, capsys, num_replicas, how) -> None:
    assert run((*files, "--num-replicas", num_replicas, "--save", "plan.json")) == 0
    assert f"plan.json is written; it is run {how}" in capsys.readouterr().err


def test_a_page_shows_the_timeline_without_a_run(files: tuple[str, ...]) -> None:
    assert run((*files, "--html", "plan.html")) == 0
    page = Path("plan.html").read_text()
    assert "Candidates" in page and "Where the time goes" in page
    assert run((*files, "--html", "plan.html")) == 0  # ours is renewed


def test_another_file_is_not_overwritten_by_a_page(files, capsys) -> None:
    Path("mine.html").write_text("mine")
    assert run((*files, "--html", "mine.html")) == 2
    assert "mine.html exists already" in capsys.readouterr().err
    assert Path("mine.html").read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "words"),
    (
        (("--cluster", "nowhere.toml"), "nowhere.toml"),
        (("--profile", "none.json"), "none.json"),
        (("--batch-size", "0"), "0 is not in the range"),
        (("--num-replicas", "9"), "batch_size=8 for num_replicas=9"),
        (("--schedule", "fastest"), "'fastest' is not one of"),
        (("recipe.toml",), "give either a TARGET or --profile"),
        (("--set", "a.b=1"), "--set, --microbatch-size and --measure are for a TARGET"),
        (("--sharding", "megatron"), "nobody knows the operators of this model"),
    ),
)
def test_a_mistake_is_one_line_and_exit_code_2(files, change, words, capsys) -> None:
    assert run((*files, *change)) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said


def test_truncated_files_are_refused_by_name(files: tuple[str, ...], capsys: Captured) -> None:
    whole = Path("model.json").read_text()
    Path("model.json").write_text(whole[: len(whole) // 2])
    assert run(files) == 2
    assert "model.json: it is damaged" in capsys.readouterr().err
    Path("model.json").write_text(whole)
    data = json.loads(whole)
    data["weights"] = data["weights"][1:]
    Path("model.json").write_text(json.dumps(data))
    assert run(files) == 2
    assert "model.json: a profile of 4 layers has weights for 3" in capsys.readouterr().err


def test_profiles_of_different_models_are_refused_by_their_first_layer(files, capsys) -> None:
    chain([1.0] * 5).save("other.json")
    assert run((*files, "--profile", "other.json")) == 2
    assert "another model: it has 5 layers" in capsys.readouterr().err
    assert Profile.load("other.json") == chain([1.0] * 5)


@pytest.mark.slow
def test_a_recipe_is_planned_for_accelerators_without_its_weights(capsys: Captured) -> None:
    digits = "digits"
    assert run(("plan", digits, "--cluster", "dgx-a100", "--num-ranks", "2")) == 0
    assert "11 layers as " in capsys.readouterr().out


def test_a_text_that_is_not_there_is_planned_for_by_its_shapes(capsys: Captured) -> None:
    counted = ("profile", "gpt.toml", "--device", "h100", "--microbatch-size", "3")
    assert run((*counted, "--save", "shapes.json")) == 0
    here = f"data.path={ROOT / 'README.md'}"
    assert run((*counted, "--save", "text.json", "--set", here)) == 0
    assert Profile.load("shapes.json") == Profile.load("text.json")
    assert run(("plan", "gpt.toml", "--cluster", "h100", "--best", "1")) == 0
    assert "5 layers as 1 stage x 1 replica on 1 rank" in capsys.readouterr().out


def test_stages_on_sub_meshes_are_planned_and_saved(capsys: Captured) -> None:
    command = ("plan", "gpt.toml", "--cluster", "dgx-a100", "--sharding", "megatron")
    written = ("--save", "plan.json", "--html", "plan.html")
    assert run((*command, "--num-microbatches", "2", *written)) == 0
    page = Path("plan.html").read_text()
    assert "Layers by stages" in page and "Where the time goes" in page
    said = capsys.readouterr().out
    assert "predicted: a step of" in said
    plan = Plan.load("plan.json")
    assert plan.placement.num_ranks == 8 and plan.num_microbatches == 2
    assert run((*command, "--num-replicas", "2")) == 2
    assert "num_replicas or schedules rule that out" in capsys.readouterr().err
    assert run(("plan", "gpt.toml", "--cluster", "few.toml", "--sharding", "none")) == 2
    assert "few.toml" in capsys.readouterr().err


@pytest.mark.slow
def test_the_fastest_of_both_kinds_of_plans_is_chosen(capsys: Captured) -> None:
    few_devices(2, torch_type="cuda").save("here.toml")
    steps_s = {}
    for sharding in ("auto", "none", "zero2"):  # it averages weights: no zero1
        command = ("plan", "gpt.toml", "--cluster", "here.toml", "--sharding", sharding)
        assert run((*command, "--num-microbatches", "2", "--json")) == 0
        steps_s[sharding] = Plan.from_json(capsys.readouterr().out).predicted_step_s or 0.0
    assert steps_s["auto"] <= 1.01 * min(steps_s.values())


def test_layers_of_a_recipe_are_measured_where_its_cluster_has_such_devices(
    capsys: Captured,
) -> None:
    few_devices(2, torch_type="vulkan").save("away.toml")
    command = ("plan", "gpt.toml", "--num-microbatches", "2", "--json", "--cluster", "away.toml")
    assert run(command) == 0
    assert Plan.from_json(capsys.readouterr().out).predicted_step_s
    assert run((*command, "--measure")) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert said.startswith("penstock: to measure layers for few") and "'vulkan'" in said


@pytest.mark.parametrize(
    ("recipe", "words"),
    (
        ("imagenet_amoebanet_b", "the data folder data/imagenet does not exist"),
        ("translation_T6_8192_16", "data/parallel does not exist"),
    ),
)
def test_data_whose_shapes_no_recipe_says_are_named_in_one_line(recipe, words, capsys) -> None:
    assert run(("plan", recipe, "--cluster", "h100")) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_one_rank_runs_the_schedule_that_was_asked_for(files, capsys) -> None:
    assert run((*files, "--num-ranks", "1", "--schedule", "one_f_one_b", "--json")) == 0
    plan = Plan.from_json(capsys.readouterr().out)
    assert (plan.num_stages, plan.schedule) == (1, one_f_one_b)


def test_a_device_is_a_host_of_one(files: tuple[str, ...], capsys: Captured) -> None:
    assert run((*files, "--cluster", "none")) == 2
    assert "devices, each a host of one, are a100-40gb, " in capsys.readouterr().err
    assert run(("plan", "--help")) == 0
    assert "a device such as h100 (a host of one)" in " ".join(capsys.readouterr().out.split())
