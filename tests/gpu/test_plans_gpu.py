"""What is planned for a GPU, calibrated and measured there, trains as the unsplit model does."""

import copy
from collections.abc import Callable
from functools import partial
from math import isfinite
from unittest.mock import patch

import pytest
import torch

import penstock
from penstock.costs.counting.count import record_graph
from penstock.doctor.calibration.calibrate import calibrate
from penstock.doctor.calibration.figures import TINY, comment_of
from penstock.model.capture.capture import resolve_layers
from tests.few_devices import cluster
from tests.gpu.models import Subject, gradients, language, products, unlike, unsplit

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

ON_GPU = pytest.mark.parametrize("device", ["cuda:0"])
Make = Callable[[str], Subject]
QUICK = partial(calibrate, 0.5, TINY)


def one_of(device: str) -> penstock.Cluster:
    peaks = {"float32": 1e12, "float64": 1e12}
    return cluster(1, torch_type=torch.device(device).type, flops_per_s=peaks)


def check_trains(pipe: penstock.Pipeline, subject: Subject, model: torch.nn.Module) -> None:
    """See that a step of the pipeline, which has the model, is that of the subject's own."""
    wanted, wanted_gradients = unsplit(subject, pipe.num_microbatches)
    loss = pipe.train_step(subject.inputs, subject.targets)
    assert all(p.device == subject.inputs.device for p in model.parameters())
    losses = unlike({"": loss}, {"": wanted}, max(subject.tolerance, 1e-6))
    assert losses == []
    assert unlike(gradients(model), wanted_gradients, subject.tolerance) == []


@ON_GPU
@pytest.mark.parametrize("make", [products, language])
@pytest.mark.parametrize("measure", [False, True])
def test_one_line_trains_as_the_unsplit_model(device: str, make: Make, measure: bool) -> None:
    subject = make(device)
    model = copy.deepcopy(subject.model)
    with penstock.parallelize(
        model, subject.inputs, loss=subject.loss, cluster=one_of(device), measure=measure
    ) as pipe:
        factors = pipe.plan.layer_factors
        assert len(factors) == (len(pipe) if measure else 0)
        assert all(isfinite(factor) and factor > 0 for factor in factors)
        check_trains(pipe, subject, model)


@ON_GPU
def test_one_line_plans_for_the_gpu_that_is_here(device: str) -> None:
    subject = products(device)
    model = copy.deepcopy(subject.model)
    with (
        patch("penstock.doctor.calibration.remembered.calibrate", lambda _budget_s: QUICK()),
        penstock.parallelize(model, subject.inputs, loss=subject.loss) as pipe,
    ):
        assert {d.type for d in pipe.devices} == {subject.inputs.device.type}
        check_trains(pipe, subject, model)


@ON_GPU
def test_a_calibrated_gpu_has_memory_and_rates_and_a_file_gives_it_again(device, tmp_path) -> None:
    found = QUICK()
    own = found.cluster.device_of(0)
    assert own.torch_type == torch.device(device).type
    assert {"float32", "bfloat16"} <= own.flops_per_s.keys() or own.torch_type == "cpu"
    rates = [*own.flops_per_s.values(), own.bytes_per_s, own.memory_bytes, own.issue_s]
    assert all(rate > 0 for rate in rates)
    if own.torch_type == "cuda":
        assert own.memory_bytes == torch.cuda.get_device_properties(device).total_memory
        assert own.name == torch.cuda.get_device_name(device)
    found.cluster.save(tmp_path / "here.toml", comment_of(found))
    assert penstock.Cluster.load(tmp_path / "here.toml") == found.cluster


@ON_GPU
def test_a_profile_that_was_measured_predicts_a_step(device: str) -> None:
    subject, host = products(device), QUICK().cluster
    before = copy.deepcopy(subject.model.state_dict())
    profile = penstock.profile(
        subject.model, subject.inputs, loss=subject.loss, targets=subject.targets
    )
    assert unlike(dict(subject.model.state_dict()), before) == []
    assert profile.measured_on == host.device_of(0).name
    found = [profile.sizes[0].seconds(n) for n in range(len(profile.layers))]
    assert all(own.is_measured and own.forward_s > 0 and own.backward_s > 0 for own in found)
    plan = penstock.plan(profile, host, batch_size=len(subject.inputs))
    predicted = penstock.simulate(profile, host, plan)
    assert isfinite(predicted.step_s) and predicted.step_s > 0


@ON_GPU
@pytest.mark.parametrize("make", [products, language])
def test_a_graph_is_the_same_wherever_the_model_is(device: str, make: Make) -> None:
    found = []
    for place in (device, "cpu", "meta"):
        with torch.device(place):
            subject = make(place)
        graph = record_graph(resolve_layers(subject.model, subject.inputs), subject.inputs)
        calls = [(c.layer, c.function, c.takes, c.gives, c.operators) for c in graph.calls]
        found.append((graph.tensors, calls))
    assert found[0] == found[1] == found[2]
