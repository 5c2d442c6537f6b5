"""The command line: a clear line and exit code 2 for mistakes, no traceback, a quick start."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.main import run
from penstock.cli.targets import load_target
from penstock.schedules.names import ASYNCHRONOUS_NAMES, SCHEDULE_NAMES, named_schedule
from tests.runs import sets

ROOT = Path(__file__).parents[2]
DIGITS = "digits"
GPT_SMALL = "gpt_small"

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())


@pytest.mark.parametrize(
    "command", [[], ["train"], ["check"], ["doctor"], ["profile"], ["simulate"]]
)
def test_every_command_has_help_with_an_example(command: list[str], capsys: Captured) -> None:
    assert run([*command, "--help"]) == 0
    assert f"penstock {' '.join(command)}" in capsys.readouterr().out.split("Example")[1]


def test_a_simulated_step_has_a_page(capsys: Captured) -> None:
    command = ["simulate", "--schedule", "gpipe", "--num-stages", "2", "--html", "step.html"]
    assert run(command) == 0
    page = Path("step.html").read_text()
    assert "<h1>gpipe, simulated</h1>" in page and "A unit of time is shown as 1 s." in page
    assert "rank 1" in capsys.readouterr().out
    Path("step.html").write_text("mine")
    assert run(command) == 2
    assert "step.html exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        *("--help", "train --help", "check --help"),
        *("doctor --help", "profile --help", "simulate --json"),
    ],
)
def test_a_command_without_tensors_imports_nothing_heavy(arguments: str) -> None:
    program = (
        "import sys\n"
        "from penstock.cli.main import run\n"
        "assert run(sys.argv[1:]) == 0\n"
        "heavy = {'torch', 'numpy', 'pydantic', 'rich', 'safetensors'} & sys.modules.keys()\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("already", "then"), [({}, "1"), ({"TORCH_GLOO_LAZY_INIT": "0"}, "0")])
def test_one_of_many_that_train_lets_gloo_connect_those_that_talk(
    already: dict[str, str], then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"PATH": os.environ["PATH"], "WORLD_SIZE": "2", "RANK": "0", **already}
    monkeypatch.setattr(os, "environ", environment)
    assert run(["train", "nowhere.toml"]) == 2
    assert environment["TORCH_GLOO_LAZY_INIT"] == then


def test_python_m_penstock_is_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "penstock", "--version"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stdout.startswith("penstock, version ")


def test_a_full_disk_at_standard_output_is_said_once_and_changes_no_exit_code() -> None:
    command = [sys.executable, "-m", "penstock", "simulate"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert done.stderr == (
        "penstock: standard output is lost (No space left on device): nothing more is written to "
        "it\n"
    )


def test_a_closed_pipe_is_no_error() -> None:
    command = [sys.executable, "-m", "penstock", "simulate", "--num-stages", "9"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_all_is_written_to_a_pipe_that_is_non_blocking_and_full() -> None:
    command = [sys.executable, "-m", "penstock", "simulate", "--json", "--num-stages", "20"]
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with subprocess.Popen([*command, "--num-microbatches", "99"], cwd=ROOT, stdout=writer) as done:
        os.close(writer)
        text = b"".join(iter(lambda: os.read(reader, 16), b""))  # far slower than it is written
        os.close(reader)
    assert done.returncode == 0
    assert len(json.loads(text)["timeline"]["spans"]) == 20 * 99 * 2 + 19 * 99 * 4


@pytest.mark.parametrize("lost", ["/dev/full", None])
def test_a_mistake_is_a_mistake_where_nobody_can_read_it(lost: str | None) -> None:
    closes = f"2> {lost}" if lost is not None else "2>&- >&-"
    command = f"{sys.executable} -m penstock fly {closes}"
    assert subprocess.run(command, shell=True, cwd=ROOT).returncode == 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["fly"], "No such command 'fly'"),
        (["train"], "give a RECIPE, such as digits (`penstock recipes`), or --resume RUN_FOLDER"),
        (["train", "no.toml"], "there is no recipe no.toml"),
        (["train", "mymodel:example"], "`train` takes a recipe; `plan`, `profile`, `simulate`"),
        (["train", DIGITS, "--set", "pipeline.num_stage=2"], "did you mean pipeline.num_stages?"),
        (["train", DIGITS, "--set", "pipeline.num_stages=40"], "num_stages=40, but the model has"),
        (["train", DIGITS, "--set", "pipeline.partition=[1, 2]"], "=[1, 2] holds 3 layers"),
        (["train", DIGITS, "--run-folder", "."], ". exists already and is no run folder"),
        (
            ["train", DIGITS, "--num-processes", "2", "--set", "pipeline.num_stages=3"],
            "pipeline.num_stages = 3",  # found before any process is started, so only said once
        ),
        (["train", "--resume", "no", "--num-processes", "2"], "cannot resume: no does not exist"),
        (["train", "--resume", "no"], "cannot resume: no does not exist"),
        (["train", "--resume", "a", "--run-folder", "b"], "leave out --run-folder"),
        (["train", DIGITS, "--max-restarts", "2"], "--max-restarts needs --num-processes"),
        (
            ["train", DIGITS, "--set", "pipeline.num_replicas=2"],
            "start them with --num-processes 4",
        ),
        (
            ["train", DIGITS, "--set", "pipeline.num_replicas=3"],
            "a multiple of pipeline.num_replicas",
        ),
        (["check", "no.toml"], "there is no recipe no.toml"),
        (["check", "model"], "there is no recipe 'model'"),
        (["check", "no_such:thing"], "there is no module 'no_such' in"),
        (["check", "json:nothing"], "json has no function 'nothing'; it defines: dump, dumps"),
        (["check", "pathlib:Path.cwd"], "pathlib has no function 'Path.cwd'"),
        (["check", "os:getcwd"], "os:getcwd returned a str; return (layers, inputs, targets,"),
        (["doctor", "--timeout", "0"], "0.0 is not in the range 1<=x<=31536000"),
        (["simulate", "--schedule", "gpip"], "'gpip' is not one of 'gpipe', 'one_f_one_b',"),
        (
            ["simulate", "--schedule", "interleaved_1f1b", "--stages-per-rank", "1"],
            "stages per rank is 1; make it 2 or",
        ),
        (["simulate", "--window", "2"], "pipedream_2bw, have several"),
        (["simulate", "--forward", "1e400"], "'1e400' is too large a number"),
        (["check", "m:f", "--schedule", "pipedream"], "'pipedream' is not one of 'gpipe'"),
        (["simulate", "--num-stages", "0"], "0 is not in the range x>=1"),
        (["simulate", "--csv", "no.csv"], "'no.csv' does not exist"),
        (["simulate", "--csv", __file__, "--num-stages", "2"], "leave out --num-stages"),
        (["simulate", "--write-csv", "no/x.csv"], "no/x.csv: No such file or directory"),
        (["simulate", "--forward", "-1"], "forward_s is -1: no instruction takes less than 0"),
        (["simulate", "--transfer", "x"], "'x' is not a number such as 2, 0.5 or 1/3"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message, capsys) -> None:
    assert run(arguments) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("penstock: ") and said.err.count("\n") == 1
    assert message in said.err
    assert list(Path.cwd().iterdir()) == []  # nothing was begun


def test_simulate_draws_the_grid_and_the_bubble(capsys: Captured) -> None:
    small = ["--schedule", "gpipe", "--num-stages", "2", "--num-microbatches", "2"]
    assert run(["simulate", *small, "--width", "27"]) == 0
    grid = capsys.readouterr().out
    assert "rank 0 |F0F1......B0  B1  |" in grid and "rank 1 |..F0F1B0  B1  ....|" in grid
    assert "bubble 33.3%" in grid
    assert run(["simulate", "--num-stages", "3", "--num-microbatches", "7", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["breakdown"]["bubble"] == pytest.approx(2 / 9)


def test_simulate_sums_up_what_cannot_be_read_as_a_picture(capsys: Captured) -> None:
    wanted = ["simulate", "--num-stages", "2", "--num-microbatches", "40", "--width", "30"]
    assert run(wanted) == 0
    summary = capsys.readouterr().out
    assert "step    123 units of time" in summary and "bubble  2.4%" in summary
    assert "|" not in summary and max(map(len, summary.splitlines())) <= 30


@pytest.mark.parametrize("schedule", ("zb_h1", "zb_h2", "searched"))
def test_simulate_makes_a_schedule_for_the_costs_that_it_is_given(schedule, capsys) -> None:
    uneven = ["--forward", "3", "--backward-input", "1", "--backward-weight", "1/10"]
    steps = []
    for name in ("one_f_one_b", schedule):
        assert run(["simulate", "--json", "--schedule", name, *uneven]) == 0
        steps.append(json.loads(capsys.readouterr().out)["breakdown"]["step_s"])
    assert steps[1] <= steps[0] == pytest.approx(45.1)


def test_simulate_takes_a_window_and_a_familys_own_stages_per_rank(capsys: Captured) -> None:
    command = ["simulate", "--schedule", "pipedream", "--num-microbatches", "4", "--json"]
    assert run([*command, "--window", "3"]) == 0
    assert json.loads(capsys.readouterr().out)["breakdown"]["num_microbatches"] == 12
    assert run(["simulate", "--schedule", "zb_v"]) == 0
    grid = capsys.readouterr().out
    assert "rank 1 |" in grid and "rank 2 |" not in grid
    assert "step 49, bubble" in grid


def test_simulate_reads_and_writes_csv(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "schedule.csv"
    path.write_text("0F0,,0F1,,0I0,0W0,0I1,0W1\n,1F0,1B0,1F1,1B1\n")
    again = tmp_path / "again.csv"
    command = ["simulate", "--csv", str(path), "--write-csv", str(again), "--width", "41"]
    assert run([*command, "--backward-weight", "1/2", "--transfer", "0.5"]) == 0
    grid = capsys.readouterr().out
    assert "rank 0 |F0F1.....I0W..I1W|\nrank 1 |...F0B0 F1B1 ....|" in grid
    assert "F forward  B backward  I input backward  W weight backward  . idle" in grid
    assert again.read_text() == "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1B0,1F1,1B1\n"


def test_simulate_sums_up_times_that_are_no_whole_numbers(capsys: Captured) -> None:
    command = ["simulate", "--num-stages", "1", "--num-microbatches", "80", "--forward", "1/3"]
    assert run(command) == 0
    assert "step    186.667 units of time" in capsys.readouterr().out


MODEL = """
import torch
from torch import nn

class OneMore(nn.Module):
    calls = 0
    def forward(self, x):
        type(self).calls += 1
        return x + type(self).calls

def good():
    layers = [nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 2)]
    return layers, torch.randn(6, 4), torch.randn(6, 2), nn.functional.mse_loss

def bad():
    layers, *rest = good()
    return [*layers, OneMore()], *rest
"""


def test_check_says_equal_with_0_and_different_with_1(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "my_model.py").write_text(MODEL)
    assert run(["check", "my_model:good", "--num-microbatches", "3"]) == 0
    assert "EQUAL: all" in capsys.readouterr().out
    assert run(["check", "my_model:bad", "--recompute", "never", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["equal"] is False
    assert run(["check", "my_model:bad", "--schedule", "gpipe"]) == 2  # not trained as it is
    assert "counts its calls" in (said := capsys.readouterr().err)
    assert said.endswith("(raised on stage 1, in the recompute, micro-batch 0)\n")


NORMED = """
import torch
from torch import nn


def example():
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)]
    return layers, torch.randn(5, 3), torch.randn(5, 1), nn.MSELoss()
"""


def test_check_leaves_batch_norm_two_samples(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "normed.py").write_text(NORMED)
    assert run(["check", "normed:example"]) == 0
    said = capsys.readouterr()
    assert "M=2: BatchNorm needs two samples in each micro-batch" in said.err
    assert "K=2, M=2" in said.out


def test_check_takes_a_recipe_with_changes(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "book.txt").write_text("It was a dark and stormy night. " * 30)
    changes = ["data.path=book.txt", "data.length=8", "train.batch_size=4"]
    changes += ["model.num_layers=2", "model.width=8", "model.num_heads=2"]
    words = sets(*changes)
    assert run(["check", GPT_SMALL, *words, "--num-stages", "2"]) == 0
    assert "EQUAL: all" in capsys.readouterr().out
    assert run(["check", "my_model:good", "--set", "data.path=book.txt"]) == 2
    assert "changes a recipe, and my_model:good is a function" in capsys.readouterr().err


ANY_MODEL = """
import torch
from torch import nn

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9)
        self.head.weight = self.embed.weight

    def forward(self, words, labels=None):
        logits = self.head(nn.functional.dropout(self.body(self.embed(words)), 0.5, self.training))
        if labels is None:
            return {"logits": logits}
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}

WORDS = torch.arange(24).reshape(8, 3) % 9

def plain():
    return Tied(), WORDS

def with_labels():
    return Tied(), {"words": WORDS, "labels": WORDS}

def frozen():
    return Tied().requires_grad_(False), WORDS
"""


def test_check_takes_any_model_and_an_example(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "any_model.py").write_text(ANY_MODEL)
    for function in ("plain", "with_labels"):
        options = ["--num-stages", "3", "--schedule", "one_f_one_b"]
        assert run(["check", f"any_model:{function}", *options]) == 0
        said = capsys.readouterr().out
        assert "embed.weight" in said and "EQUAL: all" in said
    assert run(["check", "any_model:frozen"]) == 2
    assert "has no gradient; there is nothing to train" in capsys.readouterr().err
    assert run(["check", "any_model:plain", "--num-stages", "4"]) == 2
    assert "4 stages asked, 3 block calls found: embed, body, head" in capsys.readouterr().err


def test_check_takes_a_recipe_and_options_over_it(capsys: Captured) -> None:
    small = sets("model.width=4", "train.batch_size=32")
    options = ["--num-stages", "3", "--schedule", "one_f_one_b", "--recompute", "never"]
    assert run(["check", DIGITS, *small, *options]) == 0
    assert "K=3, M=8" in capsys.readouterr().out
    options = ["--num-stages", "4", "--schedule", "interleaved_1f1b", "--stages-per-rank", "2"]
    assert run(["check", DIGITS, *small, *options]) == 0
    assert "K=4, M=8" in capsys.readouterr().out


@pytest.mark.parametrize("schedule", [n for n in SCHEDULE_NAMES if n not in ASYNCHRONOUS_NAMES])
def test_check_takes_a_familys_own_stages_per_rank_instead_of_the_recipes(schedule: str) -> None:
    target = load_target(
        DIGITS,
        ["pipeline.schedule=interleaved_1f1b", "pipeline.stages_per_rank=4"],
        {"num_stages": 4, "schedule": schedule},
    )
    assert target.options["schedule"] == named_schedule(schedule, 4)


@pytest.mark.parametrize(
    ("environment", "arguments", "words"),
    [
        ({"WORLD_SIZE": "4", "RANK": "3"}, "", "are 2 processes, but 4 were started"),
        ({"WORLD_SIZE": "4", "RANK": "3"}, "", "penstock: rank 3: pipeline.num_stages = 2 x"),
        (
            {"WORLD_SIZE": "abc"},
            "",
            "WORLD_SIZE=abc in the environment; it must be a whole number",
        ),
        ({"WORLD_SIZE": "2"}, "--num-processes 2", "leave out --num-processes"),
    ],
)
def test_processes_that_cannot_be_are_said_before_they_meet(
    environment: dict[str, str], arguments: str, words: str, monkeypatch, capsys
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert run(["train", DIGITS, *arguments.split()]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1
