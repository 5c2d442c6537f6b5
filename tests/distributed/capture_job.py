"""Captured models, a process for each stage; called in each process."""

import copy
import warnings

import torch

import penstock
from penstock.model.ghost.inputs import EVERYWHERE
from penstock.model.ghost.layers import CapturedLayers
from penstock.model.ghost.record_model import record_model
from tests.any_models.lists import EVERY, REQUIRED
from tests.any_models.made import AnyModel
from tests.capturing import (
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
from tests.laws.test_capture_bytes import check_t5, check_unet


def train_all(mesh: penstock.Mesh, names: list[str], inputs: str) -> None:
    """Train each model as a pipeline over the mesh, and whole in this process: same bits."""
    schedule, recompute = penstock.schedules.one_f_one_b, penstock.Recompute.NEVER
    way = Way(mesh.num_stages, schedule, recompute, inputs)
    for model in EVERY:
        if model.name in names and not (model.routed and inputs == EVERYWHERE):
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
    captured = record_model(made, inputs_of(BATCH), inputs=way.inputs)
    return make_pipeline(CapturedLayers.of(captured), way, mesh)


def check_bytes(mesh: penstock.Mesh) -> None:
    """Compare what a U-Net and a T5 move with what lives at their cuts."""
    check_unet(mesh)
    check_t5(mesh)


def train_exported(mesh: penstock.Mesh) -> None:
    """Train a model with a tied weight as graphs, over the mesh and as itself here: same bits."""
    model, inputs_of = next(m for m in REQUIRED if m.name == "llama, tied").make()
    whole = copy.deepcopy(model.eval())
    inputs = {**inputs_of(BATCH), "use_cache": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", penstock.errors.ExportWarning)
        layers = penstock.capture(model, inputs, method="export")
    expected = penstock.capture(whole, inputs)
    for captured, where in ((layers, mesh), (expected, None)):
        pipe = penstock.Pipeline(
            captured,
            mesh.num_stages,
            mesh=where,
            loss=loss,
            num_microbatches=2,
            threads_per_stage=1,
        )
        pipe.train_step(inputs, torch.zeros(BATCH))
    own = gradients(model)
    assert_equal(own, {name: gradients(whole)[name] for name in own})
    assert len(own) < len(gradients(whole))
