"""The ranks of a replica work on one mini-batch: each other value that one of them is given is
found, at the steps that look."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import CheckBatches, Pipeline
from penstock.errors import BatchError, ConfigError
from penstock.mesh import Mesh
from penstock.planner.placement import Placement

from .call import call


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


WORDS = torch.randint(0, 50, (4, 6), generator=generator(0))
FLOATS = torch.randn(4, 6, generator=generator(1))


def piped(mesh: Mesh, activation: Callable[[], nn.Module] = nn.GELU, **options: Any) -> Pipeline:
    torch.manual_seed(0)
    layers = [nn.Embedding(50, 6), nn.Linear(6, 6), activation(), nn.Linear(6, 6)]
    layers = layers if mesh.shards.size == 1 else layers[1:]

    def loss(output: Tensor, target: Any) -> Tensor:
        return output.pow(2).mean() + (target["values"] * target["factor"]).mean()

    return Pipeline(layers, mesh.num_stages, loss=loss, mesh=mesh, num_microbatches=2, **options)


def said_by(run: Callable[..., Any], *arguments: Any) -> str:
    try:
        run(*arguments)
    except (BatchError, ConfigError) as error:
        return str(error)
    return ""


def of_a_pipeline(mesh: Mesh) -> dict[str, Any]:
    """Give rank 1 other batches than rank 0, one after the other, in one pipeline."""
    pipe = piped(mesh, check_batches=CheckBatches.ALWAYS)
    is_other = mesh.rank == 1

    def step(words: Tensor | None = WORDS, values: Tensor = FLOATS, factor: float = 2.0) -> str:
        target = {"values": values, "factor": factor}
        return said_by(pipe.train_step, words, target)

    shuffled = WORDS.flip(0) if is_other else WORDS
    one_off = WORDS.clone()
    one_off[3, 5] += int(is_other)
    return {
        "the same": step(),
        "other inputs": step(words=one_off),
        "another order": step(words=shuffled),
        "other targets": step(values=FLOATS + 1e-6 * is_other),
        "another number": step(factor=2.0 + is_other),
        "none on the last stage": step(words=None if is_other else WORDS),
        "outputs": said_by(pipe.eval_step, shuffled),
        "the same again": step(),
        "what ends the mesh": mesh.world.waits.background.watch.knows_failure,
    }


def test_a_rank_that_is_given_other_values_is_named_and_the_mesh_lives_on(tmp_path: Path) -> None:
    first, second = call(of_a_pipeline, (2, 1), tmp_path)
    assert first == second
    told = "the ranks of a replica were given different "
    assert first["other inputs"].startswith(f"{told}inputs: rank 0: (4, 6) torch.int64, digest ")
    assert "; rank 1: (4, 6) torch.int64, digest " in first["other inputs"]
    assert "DistributedSampler the number of the replica" in first["other inputs"]
    assert first["another order"].startswith(f"{told}inputs")
    assert first["other targets"].startswith(f"{told}targets (tensor 0 of 2): rank 0: (4, 6)")
    assert first["another number"].startswith(f"{told}targets (tensor 1 of 2): rank 0: 2.0; ")
    assert first["outputs"].startswith(f"{told}inputs")
    fine = ("the same", "none on the last stage", "the same again")
    assert [first[name] for name in fine] == ["", "", ""] and not first["what ends the mesh"]


def of_shards(mesh: Mesh) -> dict[str, Any]:
    """Give shards unlike batches at some steps, and then unlike models and arguments."""
    is_other = mesh.rank == 1
    own = {"values": FLOATS, "factor": 1.0}
    options: dict[str, Any] = {"sharding": "data", "example_inputs": FLOATS}
    by_when: dict[str, list[Any]] = {}
    for when in CheckBatches:
        pipe = piped(mesh, check_batches=when, **options)
        given = [FLOATS + is_other * (number in (5, 20, 100)) for number in range(102)]
        steps = [said_by(pipe.eval_step, x) for x in given]
        by_when[when.value] = [number for number, said in enumerate(steps) if said]
        said = said_by(pipe.train_step, FLOATS + is_other, own)
        by_when[when.value] += ["train_step"] if said else []
    other = nn.ReLU if is_other else nn.GELU
    unlike = CheckBatches.NEVER if is_other else CheckBatches.ALWAYS
    slope = (lambda: nn.LeakyReLU(0.5)) if is_other else nn.LeakyReLU
    return by_when | {
        "operators": said_by(lambda: piped(mesh, activation=Other(other), **options)),
        "arguments": said_by(lambda: piped(mesh, activation=slope, **options)),
        "check_batches": said_by(lambda: piped(mesh, check_batches=unlike, **options)),
    }


class Other:  # makes a layer of one class whose function is another's on some rank
    def __init__(self, function: type[nn.Module]) -> None:
        self._function = function

    def __call__(self) -> nn.Module:
        layer = nn.Identity()
        layer.forward = self._function().forward  # type: ignore[method-assign]
        return layer


@pytest.mark.slow
def test_shards_compare_values_when_asked_and_what_their_layers_do(tmp_path: Path) -> None:
    first, second = call(of_shards, Placement.of(range(1), num_shards=2), tmp_path)
    assert first == second and first["always"] == [5, 20, 100, "train_step"]
    assert first["first"] == [5, 100, "train_step"] and first["never"] == []
    assert "what layer 1 calls: 'gelu' on rank 0; 'relu' on rank 1" in first["operators"]
    assert "the arguments of what layer 1 calls, by their digest: " in first["arguments"]
    assert "do not agree on check_batches" in first["check_batches"]


def test_when_to_compare_is_one_of_three(tmp_path: Path) -> None:
    said = said_by(lambda: Pipeline([nn.Linear(2, 2)], 1, check_batches="last"))
    assert said == 'check_batches=\'last\'; give one of "always", "first", "never"'
    assert penstock.CheckBatches is CheckBatches
