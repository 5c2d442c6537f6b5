"""Given layouts on the command line: one of `simulate`, several of `plan --compare`."""

import json
from pathlib import Path

import pytest

import penstock
from penstock.cli.main import run
from penstock.cli.targets import loss_of_all
from tests.few_devices import cluster as few_devices

Captured = pytest.CaptureFixture[str]
_MODEL = """
import torch
from torch import nn

def example():
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))), torch.empty(16, 64)

def target():
    import penstock
    layers, inputs = example()
    return penstock.Target(name="mine", make_model=lambda: layers, inputs=inputs,
                           optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1))
"""
_LAYOUT = ("--pipeline", "2", "--virtual", "2", "--data", "2", "--microbatch-size", "2")
SIMULATE = ("simulate", "model_of_layouts:example", "--cluster", "here.toml")
COMPARE = ("plan", *SIMULATE[1:], "--compare", "layouts.toml")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder with a model, a cluster and layouts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("model_of_layouts.py").write_text(_MODEL)
    few_devices(4, torch_type="cuda").save("here.toml")
    Path("layouts.toml").write_text(
        '[pipe]\npipeline = 4\npartition = [2, 2, 2, 2]\nschedule = "gpipe"\n'
        "[mesh]\ntensor = 2\nsequence = false\n[odd]\nnum_microbatches = 1\npipeline = 3\n"
    )


def test_a_layout_by_options_is_that_of_the_library(capsys: Captured) -> None:
    again = ("--recompute", "layers", "--recompute-num-layers", "1")
    more = (*again, "--zero", "1", "--partition", "2,2,2,2", "--json")
    assert run((*SIMULATE, *_LAYOUT, *more)) == 0
    told = json.loads(capsys.readouterr().out)
    layout = penstock.Parallelism(
        pipeline=2, virtual=2, data=2, microbatch_size=2, recompute="layers", zero=1,
        recompute_num_layers=1, partition=(2, 2, 2, 2),
    )  # fmt: skip
    namespace: dict[str, object] = {}
    exec(_MODEL, namespace)
    model, inputs = namespace["example"]()  # type: ignore[operator]
    options = {"example_inputs": inputs, "batch_size": 16, "loss": loss_of_all}
    where = penstock.Cluster.load("here.toml")
    step_s = penstock.simulate(model, where, layout, **options).step_s
    assert told["step_s"] == pytest.approx(step_s + told["optimizer_s"])
    assert (told["num_devices"], told["batch_size"], told["num_microbatches"]) == (4, 16, 4)
    assert told["samples_per_s_per_device"] == pytest.approx(4 / told["step_s"])


def test_a_layout_is_told_in_lines_and_has_a_page(capsys: Captured) -> None:
    assert run((*SIMULATE, *_LAYOUT, "--html", "step.html")) == 0
    said = capsys.readouterr().out
    for word in ("of it the optimizer", "samples/s", "MFU", "bubble", "collectives", "fits"):
        assert word in said
    assert "pipeline=2, virtual=2, data=2" in said or "data=2, pipeline=2, virtual=2" in said
    assert said.rstrip().endswith("-")  # the last stage gives its output to the loss alone
    page = Path("step.html").read_text()
    assert "<h1>model_of_layouts:example on few</h1>" in page and "Where the time goes" in page


def test_layouts_of_a_file_are_compared(capsys: Captured) -> None:
    assert run((*COMPARE, "--html", "page.html", "--json")) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in rows} == {"pipe", "mesh", "odd"}
    assert rows[0]["step_s"] <= rows[1]["step_s"] and rows[2]["name"] == "odd"
    assert "which do not divide the 4 of few" in rows[2]["reason"]
    page = Path("page.html").read_text()
    assert "Timelines" in page and f"{rows[0]['name']} is the fastest of 2 layouts" in page
    assert run(COMPARE) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[3:]] == [row["name"] for row in rows]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("simulate", "--tensor", "2"), "--tensor is of a layout on devices; give --cluster"),
        (("simulate", "--recompute", "layers"), "or --recompute alone"),
        (("simulate", "--cluster", "h100"), "give one as TARGET"),
        ((*SIMULATE, "--num-stages", "2"), "give --pipeline and --virtual instead"),
        ((*SIMULATE, "--forward", "2"), "--forward does not go with --cluster: the cluster pri"),
        ((*SIMULATE, "--pipeline", "3"), "do not divide the 4 of few; near divisors of 4: 2, 4"),
        ((*SIMULATE, "--num-microbatches", "2", "--batch-size", "9"), "and batch_size=9; leave"),
        ((*SIMULATE, "--partition", "3,4"), "partition=(3, 4) has 2 stages"),
        (("plan", "--cluster", "h100", "--compare", "layouts.toml"), "give a TARGET"),
        ((*COMPARE, "--sharding", "auto"), "--sharding is for a plan that is chosen"),
        ((*COMPARE, "--microbatch-size", "2"), "--microbatch-size is for a plan"),
        ((*COMPARE, "--compare", "none.toml"), "'none.toml' does not exist"),
    ],
)
def test_options_of_the_other_form_are_refused_with_a_remedy(change, words, capsys) -> None:
    assert run(change) == 2
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it has no layouts; give a table for each"),
        ("tensor = 2", "[tensor]: it is 2; give a table"),
        ("[a]\ntensors = 2", "[a]: it has an unknown key tensors; known are tensor, data"),
        ("[a]\n[b]\ntensor = 0", "[b]: tensor=0; it must be a whole number"),
        ('[a]\nsequence = "yes"', "[a]: sequence is 'yes'; give true or false"),
        ("[a]\npartition = 3", "[a]: partition is 3; give a list of whole numbers"),
        ('[a]\nschedule = "fastest"', "[a]: "),
        ("[a", "it is damaged, or no TOML"),
    ],
)
def test_a_mistake_in_the_file_is_named_with_its_table(text, words, capsys) -> None:
    Path("bad.toml").write_text(text)
    assert run((*COMPARE[:-1], "bad.toml")) == 2
    assert f"bad.toml: {words}" in capsys.readouterr().err


def test_recompute_alone_is_a_flag_before_and_after_other_words(capsys: Captured) -> None:
    said = []
    for words in (["--recompute"], ["--recompute", "--num-stages", "4"], ["--recompute", "stage"]):
        assert run(["simulate", *words]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] == said[2] and "R recompute" in said[0]
    assert run(["simulate", "--recompute", "never"]) == 0
    assert "recompute" not in capsys.readouterr().out


def test_a_function_may_return_a_target_with_an_optimizer_of_its_own(capsys: Captured) -> None:
    """Plain SGD keeps no state, AdamW two moments: they are the bytes that differ."""
    bytes_of = {}
    for name in ("example", "target"):
        told = ("simulate", f"model_of_layouts:{name}", *SIMULATE[2:], *_LAYOUT, "--json")
        assert run(told) == 0
        bytes_of[name] = json.loads(capsys.readouterr().out)["peak_bytes_by_kind"]
    usual, own = bytes_of["example"], bytes_of["target"]
    assert {kind for kind in usual if own[kind] != usual[kind]} == {"optimizer"}
    assert own["optimizer"] == 0
