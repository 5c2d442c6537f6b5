"""Each process reads and writes its own part of a folder; all parts are the whole model."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import penstock
from penstock.checkpoint.pretrained.folder import MODEL
from tests.distributed import pretrained_job
from tests.distributed.call import call
from tests.distributed.launch import ROOT, run
from tests.distributed.pretrained_job import loss, take_steps
from tests.model.capture.any_models.required import OF_TRANSFORMERS, REQUIRED
from tests.model.capture.running import assert_equal
from tests.pretrained import (
    BATCH,
    build,
    pipeline,
    same_kernels,
    saved_by_transformers,
    whole_logits,
)

FEW = ["gpt2", "llama, tied", "t5"]
UNLIKE = ("branching", "clip")
"""Not to be drawn; see tests/model/capture/test_materialize.py."""
LIBRARY = [model.name for model in OF_TRANSFORMERS]


def check_load_and_save(names: list[str], num_stages: int, folder: Path) -> None:
    """Save by transformers, load in processes, save there, load by transformers."""
    whole = {
        name: saved_by_transformers(
            name, folder / name, max_shard_size="5KB", save_original_format=False
        )
        for name in names
    }
    options: dict[str, Any] = {"timeout_s": 600.0, "names": names}
    told = call(
        pretrained_job.load_and_save, (num_stages, 1), folder, source=str(folder), **options
    )
    for name, of_ranks in zip(names, zip(*told, strict=True), strict=True):
        total = sum(p.numel() for p in whole[name].parameters())
        assert sum(rank["held"] for rank in of_ranks) == total, name
        num_files = len([*(folder / name).glob("*.safetensors")])
        assert all(rank["num_files"] < num_files for rank in of_ranks), name
        parameters = {n for n, _ in whole[name].named_parameters(remove_duplicate=False)}
        read = Counter(n for rank in of_ranks for n in rank["read"] if n in parameters)
        assert set(read.values()) == {1}, "a parameter was read more than once"
        expected = whole_logits(whole[name], build(name)[1](BATCH))
        for number, rank in enumerate(of_ranks):
            assert torch.equal(rank["logits"], expected), name
            assert rank["unknown"] == (), name
            assert f" {rank['held']:,} parameters" in rank["text"], rank["text"]
            counts = re.findall(r" ([\d,]+) parameters", rank["text"])
            assert sum(int(count.replace(",", "")) for count in counts) == total, rank["text"]
            assert f"stage {number} on cpu" in rank["text"]
        kind: Any = type(whole[name])
        again = kind.from_pretrained(folder / f"{name}-again")
        same_kernels(name, again)
        assert_equal(again.state_dict(), whole[name].state_dict())
        assert torch.equal(whole_logits(again, build(name)[1](BATCH)), expected), name


@pytest.mark.slow
def test_three_processes_load_and_save_what_transformers_does(tmp_path: Path) -> None:
    check_load_and_save(FEW, 3, tmp_path)


@pytest.mark.slow
def test_processes_load_and_save_all_models_of_the_library(tmp_path: Path) -> None:
    check_load_and_save([name for name in LIBRARY if name not in FEW], 2, tmp_path)


def check_drawn(names: list[str], num_stages: int, folder: Path) -> None:
    """Draw in processes and in one; the values are the same."""
    told = call(pretrained_job.draw, (num_stages, 1), folder, names=names)
    for name, of_ranks in zip(names, zip(*told, strict=True), strict=True):
        expected = pretrained_job.values(pipeline(build(name, device="meta"), 1, seed=5))
        for found in of_ranks:
            assert_equal(found, {n: expected[n] for n in found})
        assert set().union(*of_ranks) == expected.keys(), name


@pytest.mark.slow
def test_values_of_all_models_drawn_in_processes_are_those_of_one(tmp_path: Path) -> None:
    check_drawn([m.name for m in REQUIRED if m.name not in UNLIKE], 3, tmp_path)


@pytest.mark.slow
def test_all_processes_refuse_what_one_must(tmp_path: Path) -> None:
    saved_by_transformers("gpt2", tmp_path / "gpt2")
    content = load_file(tmp_path / "gpt2" / MODEL)
    first, last = "transformer.h.0.ln_1.bias", "transformer.ln_f.bias"
    del content[first]
    content[last] = torch.zeros(3)
    (tmp_path / "unfit").mkdir()
    save_file(content, tmp_path / "unfit" / MODEL)
    told = call(pretrained_job.refuse, (2, 1), tmp_path, name="gpt2", source=str(tmp_path))
    assert told[0] == told[1]
    nowhere, unfit, filled, at_once = told[0]
    assert "does not exist" in nowhere and f"{first} is missing" in unfit
    assert f"{last} has the shape [3], the model's {last} [32]" in unfit
    assert "never overwritten" in filled and at_once == unfit


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama, tied", "resnet"])
def test_training_from_a_folder_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    penstock.save_pretrained(tmp_path / name, pipeline(build(name), 1))
    made = build(name, device="meta")
    alone = pipeline(made, 1, weights=tmp_path / name, loss=loss, num_microbatches=2)
    expected = take_steps(alone, made[1](BATCH))
    told = call(pretrained_job.train, (2, 1), tmp_path, name=name, source=str(tmp_path))
    assert told == [expected, expected]
    again = pipeline(build(name, device="meta"), weights=tmp_path / "trained")
    assert_equal(dict(again.original.state_dict()), dict(alone.original.state_dict()))


@pytest.mark.slow
def test_the_guides_code_trains_alike_in_one_process_and_in_two(tmp_path, monkeypatch) -> None:
    make, train, look = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "pretrained.md").read_text(), re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    exec(make, {})
    (tmp_path / "train.py").write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{train}")
    outputs = [run(size, [str(tmp_path / "train.py")])[0].output for size in (1, 2)]
    lines = [[line for line in text.splitlines() if ": loss " in line] for text in outputs]
    assert len(lines[0]) == 5 and lines[0] == lines[1]
    exec(look, {})
    one, two = (load_all(tmp_path / f"trained-{size}") for size in (1, 2))
    assert_equal(one, two)


def load_all(folder: Path) -> dict[str, Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


@pytest.mark.slow
def test_replicas_load_alike_and_the_first_one_saves(tmp_path: Path) -> None:
    check = saved_by_transformers("gpt2", tmp_path / "gpt2")
    call(pretrained_job.save_from_replicas, (2, 2), tmp_path, source=str(tmp_path))
    pipe = pipeline(build("gpt2", device="meta"), weights=tmp_path / "again")
    assert_equal(dict(pipe.original.state_dict()), dict(check.state_dict()))
    assert isinstance(pipe, penstock.Pipeline)
