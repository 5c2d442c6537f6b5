"""Captured models, a process for each stage; called in each process."""

import copy
import warnings

import torch

import penstock
from tests.any_models import REQUIRED, AnyModel
from tests.capturing import BATCH, MICROBATCHES, assert_equal, gradients, loss, random_cut
from tests.laws.test_capture_bytes import check_t5, check_unet


def train_all(mesh: penstock.Mesh, names: list[str]) -> None:
    """Train each model as a pipeline over the mesh, and whole in this process: same bits."""
    for model in REQUIRED:
        if model.name in names:
            train(mesh, model)


def train(mesh: penstock.Mesh, model: AnyModel) -> None:
    """Compare losses, and the gradients and buffers of the own stage."""
    spread, whole = make(model, mesh), make(model, None)
    inputs_of = model.make()[1]
    for batch in (BATCH, BATCH, 2):
        target = torch.zeros(batch)
        inputs = inputs_of(batch) if mesh.stage == 0 else None
        last = mesh.stage == mesh.num_stages - 1
        found = spread.train_step(inputs, target if last else None)
        assert torch.equal(found, whole.train_step(inputs_of(batch), target)), model.name
    expected, own = gradients(whole), gradients(spread)
    assert_equal(own, {name: expected[name] for name in own})
    named = [name for part in mesh.gather(list(own), "for the others' names") for name in part]
    assert sorted(named) == sorted(expected), model.name  # each on one stage
    whole.close()


def make(model: AnyModel, mesh: penstock.Mesh | None) -> penstock.Pipeline:
    """Make a pipeline over the mesh, or of one stage here."""
    made, inputs_of = model.make()
    made.train()
    layers = penstock.capture(made, inputs_of(BATCH), check=False)
    return penstock.Pipeline(
        layers,
        mesh=mesh,
        partition=random_cut(len(layers), 1 if mesh is None else mesh.num_stages),
        num_microbatches=MICROBATCHES,
        loss=loss,
        schedule=penstock.schedules.one_f_one_b,
        threads_per_stage=1,
    )


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
