"""What was found for a shape is read again, for what is the same in all that it depends on."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.automatic.choose import MeshTask, plan_on_meshes
from penstock.costs.cluster import Cluster
from penstock.costs.count import record_graph
from penstock.costs.graph import Graph
from penstock.model.layer_list import as_layers
from penstock.planner.arguments import Model
from penstock.runtime.microbatches import first_microbatch
from penstock.runtime.planning import facts_of
from penstock.sharding.search import Search

LAYERS = as_layers(
    [nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(2)]
)
INPUTS = torch.zeros(8, 32)


@cache
def graph() -> Graph:
    return record_graph(LAYERS, first_microbatch(INPUTS, 4))


def plan_text(
    cluster: str = "p3.16xlarge",
    num_microbatches: int = 4,
    sharding: str = "auto",
    factor: float = 1.0,
) -> str:
    task = MeshTask(
        model=Model(facts_of(LAYERS), LAYERS.spans),
        names=[step.path for step in LAYERS],
        graph_of=lambda _: graph(),
        cluster=Cluster.load(cluster),
        batch_size=8,
        num_microbatches=num_microbatches,
        shardings=(sharding,),
        factors_of=lambda _: (factor,) * len(LAYERS),
    )
    return str(plan_on_meshes(task))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of its own."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    return tmp_path / "penstock" / "prices"


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes that are searched."""
    found: list[tuple[int, ...]] = []

    def search(*args: Any) -> Search:
        found.append(args[4].mesh)
        return Search(*args)

    monkeypatch.setattr("penstock.automatic.prices.Search", search)
    return found


def test_a_second_plan_searches_nothing_and_is_the_same(
    folder: Path, searched: list[tuple[int, ...]]
) -> None:
    first = plan_text()
    num_shapes = len(searched)
    assert len([*folder.iterdir()]) >= num_shapes > 0
    assert plan_text() == first
    assert len(searched) == num_shapes


@pytest.mark.parametrize(
    "other",
    [{"cluster": "dgx-a100"}, {"num_microbatches": 8}, {"sharding": "data"}, {"factor": 2.0}],
    ids=str,
)
def test_what_depends_on_other_things_is_not_taken(
    other: dict[str, Any],
    folder: Path,
    searched: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan_text()
    num_shapes = len(searched)
    found = plan_text(**other)
    assert len(searched) == 2 * num_shapes
    monkeypatch.setenv("PENSTOCK_CACHE", "off")
    assert plan_text(**other) == found


def test_another_version_of_the_source_searches_again(
    folder: Path, searched: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan_text()
    num_shapes = len(searched)
    monkeypatch.setattr("penstock.automatic.remembered._source", lambda: "another")
    plan_text()
    assert len(searched) == 2 * num_shapes


@pytest.mark.parametrize(
    "damage", [lambda x: x[:-9], lambda x: x[:40] + b"?" + x[41:], bytes.upper]
)
def test_damaged_files_are_written_anew(
    damage: Callable[[bytes], bytes], folder: Path, searched: list[tuple[int, ...]]
) -> None:
    first = plan_text()
    num_shapes = len(searched)
    whole = {file: file.read_bytes() for file in folder.iterdir()}
    for file, content in whole.items():
        file.write_bytes(damage(content))
    assert plan_text() == first
    assert len(searched) == 2 * num_shapes
    assert {file: file.read_bytes() for file in folder.iterdir()} == whole


@pytest.mark.parametrize("is_off", [True, False])
def test_nothing_is_kept_where_that_cannot_be_or_is_not_wanted(
    is_off: bool, tmp_path: Path, searched: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_CACHE", "off" if is_off else "file")
    assert plan_text() == plan_text()
    assert [file.name for file in tmp_path.rglob("*")] == ["file"]
    assert len(searched) == 2 * len({*searched})
