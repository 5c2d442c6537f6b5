"""One line plans a model for what there is, and runs as the unsplit model does."""

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock
from penstock import Plan
from penstock.errors import ConfigError, PlanError
from penstock.types import Recompute
from tests.distributed.launch import run
from tests.distributed.parallel_job import MODELS, cluster_of, train
from tests.few_devices import cluster
from tests.sharding.test_pipeline import WORDS, loss, made, piped


def job(hosts: str, folder: Path, count: int, **options: Any) -> list[dict[str, Any]]:
    """Run the one line in so many processes; give what each found."""
    told = ["-m", "tests.distributed.parallel_job", str(folder), hosts, json.dumps(options)]
    run(count, told, 200.0)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(count)]


@pytest.mark.parametrize(
    ("hosts", "number", "meshes"),
    [
        ("1,2", 5, [[1, 2], [0]]),
        pytest.param("1,2", 1, [[1, 2]], marks=pytest.mark.slow),
        pytest.param("2,1", 5, [[0, 1], [2]], marks=pytest.mark.slow),
        pytest.param("1,2,1", 5, [[1, 2], [0], [3]], marks=pytest.mark.slow),
        pytest.param("3", None, [[0, 1, 2]], marks=pytest.mark.slow),
    ],
)
def test_a_stage_on_each_host_is_planned_and_is_the_unsplit_model(
    hosts: str, number: int | None, meshes: list[list[int]], tmp_path: Path
) -> None:
    """The first stages may be on later hosts: their ranks are those of the cluster."""
    count = sum(map(int, hosts.split(",")))
    results = job(hosts, tmp_path, count, num_microbatches=number)
    plan = Plan.from_json(results[0]["plan"])
    assert [[*ranks[0]] for ranks in plan.placement.ranks] == meshes
    assert {*plan.placement.idle} == {*range(count)} - {*chain(*meshes)}
    assert "predicted: a step of" in results[0]["text"]
    check_trained(plan, results)


@pytest.mark.parametrize(
    ("words", "sharding", "meshes"),
    [
        (
            {
                "tensor": 2,
                "data": 1,
                "pipeline": 2,
                "virtual": 2,
                "recompute": "layers",
                "recompute_num_layers": 1,
            },
            "megatron",
            [(2,), (2,)],
        ),
        pytest.param(
            {"tensor": 2, "data": 2, "sequence": True, "zero": 1, "microbatch_size": 2},
            "grid+sequence+zero1",
            [(2, 2)],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"data": 2, "pipeline": 2, "virtual": 2, "recompute": "layers"},
            "data",
            [(2,), (2,)],
            marks=pytest.mark.slow,
        ),
    ],
    ids=("tensor x pipeline x virtual", "tensor x data", "data x pipeline x virtual"),
)
def test_a_given_layout_is_the_unsplit_model(
    words: dict[str, Any], sharding: str, meshes: list[tuple[int, ...]], tmp_path: Path
) -> None:
    """Interleaved stages and shards of one block each; the batch is one sample larger."""
    given = {"partition": None, **words}
    results = job("4", tmp_path, 4, parallelism=given)
    plan = Plan.from_json(results[0]["plan"])
    assert plan.sharding == sharding
    shapes = [plan.placement.shard_axes_of(stage) for stage in range(len(meshes))]
    assert shapes == meshes
    check_trained(plan, results)


@pytest.mark.slow
def test_stages_that_recompute_each_layer_are_the_unsplit_model(tmp_path: Path) -> None:
    results = job("1,2", tmp_path, 3, policies=["layers"], num_microbatches=5)
    plan = Plan.from_json(results[0]["plan"])
    assert [len(mesh[0]) for mesh in plan.placement.meshes] == [2, 1]
    assert set(plan.recompute) == {Recompute.LAYERS}
    check_trained(plan, results)


@pytest.mark.slow
def test_what_rank_0_measured_is_what_all_plan_by(tmp_path: Path) -> None:
    results = job("1,2", tmp_path, 3, measure=True, num_microbatches=2)
    plan = Plan.from_json(results[0]["plan"])
    assert len({*plan.layer_factors}) > 1
    assert {found["plan"] for found in results} == {results[0]["plan"]}
    check_trained(plan, results)


def check_trained(plan: Plan, results: list[dict[str, Any]]) -> None:
    """Check two steps of a plan against those of the unsplit model."""
    wanted = train(piped(made(0), partition=[7], num_microbatches=plan.num_microbatches))
    names = set()
    for found in results:
        mine, own = torch.stack(found["losses"]), torch.stack(wanted["losses"])
        assert torch.allclose(mine, own, rtol=0, atol=1e-12)
        for name, gradient in found["gradients"].items():
            assert torch.allclose(gradient, wanted["gradients"][name], rtol=0, atol=1e-12), name
        names |= found["gradients"].keys()
    assert names == wanted["gradients"].keys()


@pytest.mark.slow
def test_a_model_without_lists_is_clustered_and_is_the_unsplit_model(tmp_path: Path) -> None:
    results = job("1,2", tmp_path, 3, model="attributes", num_layers=3, num_microbatches=5)
    plan = Plan.from_json(results[0]["plan"])
    assert [len(ranks[0]) for ranks in plan.placement.ranks] == [2, 1]
    whole = MODELS["attributes"](0)
    assert sum(plan.partition) == len([*whole.children()])
    wanted = train(piped(whole, partition=[sum(plan.partition)], num_microbatches=5))
    for found in results:
        mine, own = torch.stack(found["losses"]), torch.stack(wanted["losses"])
        assert torch.allclose(mine, own, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_alone_it_is_a_pipeline_of_one_stage() -> None:
    pipe = penstock.parallelize(made(0), WORDS, loss=loss, cluster=cluster_of(1), seed=3)
    assert (pipe.num_stages, pipe.plan.sharding) == (1, None)
    found = train(pipe)
    wanted = train(piped(made(0), partition=[7], num_microbatches=pipe.plan.num_microbatches))
    assert all(torch.equal(a, b) for a, b in zip(found["losses"], wanted["losses"], strict=True))


def test_what_cannot_work_is_refused_before_any_process_is_met() -> None:
    with pytest.raises(ConfigError, match="few has 2 devices, and there is 1 process; start one"):
        penstock.parallelize(made(0), WORDS, loss=loss, cluster=cluster_of(2))
    fast = cluster(1, torch_type="cuda")
    with pytest.raises(ConfigError, match="model and inputs are on cpu; give both on cuda"):
        penstock.parallelize(made(0), WORDS, loss=loss, cluster=fast, measure=True)
    with pytest.raises(ConfigError, match="are on meta; give both on one device, or measure=Fal"):
        penstock.parallelize(made(0).to("meta"), WORDS.to("meta"), loss=loss, measure=True)
    with pytest.raises(ConfigError, match="measure='no'; give True, False or \"auto\""):
        penstock.parallelize(made(0), WORDS, loss=loss, measure="no")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="batch_size=6, and example_inputs hold 5 samples"):
        penstock.parallelize(made(0), WORDS, loss=loss, cluster=cluster_of(1), batch_size=6)


def test_what_no_memory_holds_says_by_how_much() -> None:
    small = cluster_of(1)
    device = penstock.Cluster.to_toml(small).replace("1073741824", "1000")
    with pytest.raises(PlanError, match="no stages fit: those that need least lack"):
        penstock.parallelize(made(0), WORDS, loss=loss, cluster=penstock.Cluster.from_toml(device))
