"""Captured models, a process for each stage; called in each process."""

import torch

import penstock
from penstock.model.ghost.capture import capture
from penstock.model.ghost.inputs import EVERYWHERE
from penstock.model.ghost.layers import CapturedLayers
from tests.any_models.lists import EVERY
from tests.any_models.made import AnyModel
from tests.capturing import (
    BATCH,
    SIZES,
    WHOLE,
    Way,
    assert_equal,
    evaluated,
    gradients,
    make_pipeline,
)


def train_all(mesh: penstock.Mesh, names: list[str], inputs: str) -> None:
    """Train each model as a pipeline over the mesh, and whole in this process: same bits."""
    schedule, recompute = penstock.schedules.one_f_one_b, penstock.Recompute.NEVER
    way = Way(mesh.num_stages, schedule, recompute, inputs)
    for model in EVERY:
        if model.name in names:
            train(mesh, model, way)


def train(mesh: penstock.Mesh, model: AnyModel, way: Way) -> None:
    """Compare losses, outputs, and the gradients of the own stage."""
    spread, whole = make(model, way, mesh), make(model, WHOLE, None)
    inputs_of = model.make()[1]
    last = mesh.stage == mesh.num_stages - 1
    for batch in SIZES:
        target = torch.zeros(batch)
        inputs = inputs_of(batch) if mesh.stage == 0 or way.inputs == EVERYWHERE else None
        found = spread.train_step(inputs, target if last else None)
        assert torch.equal(found, whole.train_step(inputs_of(batch), target)), model.name
    outputs = evaluated(whole, inputs_of(batch))
    if outputs:
        assert all(map(torch.equal, evaluated(spread, inputs), outputs)), model.name
    expected, own = gradients(whole), gradients(spread)
    assert_equal(own, {name: expected[name] for name in own})
    named = [name for part in mesh.gather(list(own), "for the others' names") for name in part]
    assert sorted(named) == sorted(expected), model.name  # each on one stage
    whole.close()


def make(model: AnyModel, way: Way, mesh: penstock.Mesh | None) -> penstock.Pipeline:
    """Make a pipeline over the mesh, or of one stage here."""
    made, inputs_of = model.make()
    made.train()
    captured = capture(made, inputs_of(BATCH), inputs=way.inputs)
    return make_pipeline(CapturedLayers.of(captured), way, mesh)
