"""Captured models have the same bits with a process for each stage."""

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.model.capture.captured import record_model
from penstock.model.capture.inputs import EVERYWHERE, ROUTED
from penstock.model.capture.source import captured_layers
from penstock.model.pytree import flatten
from tests.distributed.call import call
from tests.model.capture.any_models.lists import EVERY, OTHERS, REQUIRED
from tests.model.capture.any_models.made import AnyModel
from tests.model.capture.any_models.odd import CHAINS
from tests.model.capture.running import (
    BATCH,
    SIZES,
    WHOLE,
    Way,
    assert_equal,
    evaluated,
    gradients,
    loss,
    make_pipeline,
)
from tests.model.capture.test_bytes import check_t5, check_unet
from tests.side_by_side import same_bits


def train_all(mesh: penstock.Mesh, names: dict[str, list[str]]) -> None:
    """Train models, by where their inputs are, over the mesh and whole in this process: same bits.

    Those that draw outside torch do so with every recompute, others with one.
    """
    schedule, never = penstock.schedules.one_f_one_b, penstock.Recompute.NEVER
    for given, model in product(names, EVERY):
        if model.name not in names[given]:
            continue
        recomputes = penstock.Recompute if "NumPy's" in model.name else (never,)
        for recompute in () if model.routed and given == EVERYWHERE else recomputes:
            train(mesh, model, Way(mesh.num_stages, schedule, recompute, given))


def train(mesh: penstock.Mesh, model: AnyModel, way: Way) -> None:
    """Compare losses, outputs, and the gradients of the own stage."""
    spread, whole = make(model, way, mesh), make(model, WHOLE, None)
    inputs_of, what = model.make()[1], f"{model.name}, {way}"
    last = mesh.stage == mesh.num_stages - 1
    for batch in SIZES:
        target = torch.zeros(batch)
        inputs = inputs_of(batch) if mesh.stage == 0 or way.inputs == EVERYWHERE else None
        found = spread.train_step(inputs, target if last else None)
        assert torch.equal(found, whole.train_step(inputs_of(batch), target)), what
    outputs = evaluated(whole, inputs_of(batch))
    if outputs:
        assert all(map(torch.equal, evaluated(spread, inputs), outputs)), what
        if isinstance(inputs_of(batch), dict):
            by_name = spread.eval_step(**(inputs or {}))
            assert all(map(torch.equal, flatten(by_name)[0], outputs)), what
    expected, own = gradients(whole), gradients(spread)
    assert_equal(own, {name: expected[name] for name in own})
    every = mesh.world.gather(list(own), "for the others' names")
    named = [name for part in every for name in part]
    assert sorted(named) == sorted(expected), model.name  # each on one stage
    whole.close()


def make(model: AnyModel, way: Way, mesh: penstock.Mesh | None) -> penstock.Pipeline:
    """Make a pipeline over the mesh, or of one stage here."""
    made, inputs_of = model.make()
    made.train()
    captured = record_model(made, inputs_of(BATCH), inputs=way.inputs)
    return make_pipeline(captured_layers(captured), way, mesh)


def check_bytes(mesh: penstock.Mesh) -> None:
    """Compare what a U-Net and a T5 move with what lives at their cuts."""
    check_unet(mesh)
    check_t5(mesh)


def tied_weights_are_one(mesh: penstock.Mesh, where: str) -> None:
    """Train a model with a tied weight: norm, optimizer state and checkpoint know one."""
    model, inputs_of = next(m for m in REQUIRED if m.name == "t5").make()
    whole, resumed = copy.deepcopy(model.eval()), copy.deepcopy(model.eval())
    inputs, path = inputs_of(BATCH), Path(where) / "checkpoint"
    spread, alone = trained(model, inputs, mesh), trained(whole, inputs, None)
    for _ in range(2):
        assert torch.equal(step(*spread, inputs), step(*alone, inputs))
    penstock.save_checkpoint(path, *spread, steps=2)
    again = trained(resumed, inputs, None)
    assert penstock.load_checkpoint(path, *again) == {"steps": 2}
    norms = [step(*pair, inputs) for pair in (spread, alone, again)]
    assert all(torch.equal(norm, norms[0]) for norm in norms)
    expected = dict(whole.named_parameters())
    for name, parameter in (*spread[0].named_parameters(), *resumed.named_parameters()):
        assert torch.equal(parameter, expected[name]), name
    check_summed(mesh, inputs)


def check_summed(mesh: penstock.Mesh, inputs: Any) -> None:
    """Send gradients of tied weights once a step; threads of the same stages give their bits."""
    gradients = []
    partition: tuple[int, ...] | None = None
    for where in (mesh, None):
        model = next(m for m in REQUIRED if m.name == "t5").make()[0].eval()
        options: dict[str, Any] = {"partition": partition, "mesh": where, "loss": loss}
        options |= {"num_microbatches": 2, "threads_per_stage": 1}
        options |= {"tied_gradients": penstock.TiedGradients.SUMMED}
        pipe = penstock.Pipeline(penstock.capture(model, inputs, check=False), **options)
        pipe.train_step(inputs, torch.zeros(BATCH))
        partition = pipe.partition
        gradients.append({n: p.grad for n, p in pipe.named_parameters()})
    spread, alone = gradients
    assert all(same_bits(gradient, alone[name]) for name, gradient in spread.items())


def trained(
    model: nn.Module, inputs: Any, mesh: penstock.Mesh | None
) -> tuple[penstock.Pipeline, torch.optim.Optimizer]:
    """Make a pipeline over the mesh, or of two stages here, and its optimizer."""
    pipe = penstock.Pipeline(
        penstock.capture(model, inputs, check=False),
        2 if mesh is None else mesh.num_stages,
        mesh=mesh,
        loss=loss,
        num_microbatches=2,
        threads_per_stage=1,
    )
    return pipe, torch.optim.AdamW(pipe.parameters(), lr=1e-2)


def step(pipe: penstock.Pipeline, optimizer: torch.optim.Optimizer, inputs: Any) -> torch.Tensor:
    """Train one step; give the norm of all gradients."""
    pipe.train_step(inputs, torch.zeros(BATCH))
    norm = penstock.clip_grad_norm_(pipe, 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return norm


FEW = [
    "gpt2",
    "t5",
    "unet",
    "branching",
    "NumPy between blocks",
    "Python's and NumPy's random numbers between blocks",
    "layers dropped by Python's and NumPy's random numbers",
    "parameters between blocks",
    "a checkpoint around a tied block",
]
INPUTS = [ROUTED, EVERYWHERE]


@pytest.mark.slow
@pytest.mark.parametrize("first", (0, 1))
def test_captured_models_in_two_processes(first: int, tmp_path: Path) -> None:
    """Models take turns: where inputs travel, and where each stage is given them."""
    names = {inputs: FEW[(first + n) % 2 :: 2] for n, inputs in enumerate(INPUTS)}
    call(train_all, (2, 1), tmp_path, names=names)


@pytest.mark.slow
@pytest.mark.parametrize(("num_stages", "inputs"), [(2, EVERYWHERE), (3, ROUTED)])
def test_required_models_in_processes(num_stages: int, inputs: str, tmp_path: Path) -> None:
    names = [model.name for model in REQUIRED[num_stages % 2 :: 2]]  # they take turns
    call(train_all, (num_stages, 1), tmp_path, timeout_s=600.0, names={inputs: names})


@pytest.mark.slow
@pytest.mark.parametrize("inputs", INPUTS)
def test_other_models_in_processes(inputs: str, tmp_path: Path) -> None:
    """Every fourth: each one is tried with threads, in test_equality.py of captured models."""
    first = INPUTS.index(inputs)  # which the models take in turn
    names = [m.name for m in (*OTHERS, *CHAINS)][first :: 2 * len(INPUTS)]
    call(train_all, (2, 1), tmp_path, timeout_s=600.0, names={inputs: names})


@pytest.mark.slow
def test_four_processes_move_what_lives_at_the_cuts(tmp_path: Path) -> None:
    call(check_bytes, (4, 1), tmp_path)


@pytest.mark.slow
def test_a_tied_weight_is_one_to_norms_optimizers_and_checkpoints(tmp_path: Path) -> None:
    call(tied_weights_are_one, (3, 1), tmp_path, where=str(tmp_path))
