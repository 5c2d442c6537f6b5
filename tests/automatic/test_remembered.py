"""What was found for a shape is read again, for what is the same in all that it depends on."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock import Plan
from penstock.automatic.choose import MeshTask, _look, plan_on_meshes
from penstock.automatic.parallelize import plan_for
from penstock.automatic.remembered import is_cut_short
from penstock.costs.cluster import Cluster
from penstock.costs.count import record_graph
from penstock.costs.graph import Graph
from penstock.model.layer_list import as_layers
from penstock.planner.arguments import Model
from penstock.runtime.microbatches import first_microbatch
from penstock.runtime.planning import facts_of
from penstock.sharding.search import Search
from penstock_recipes.zoo import gpt
from tests.few_devices import cluster

LAYERS = as_layers(
    [nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)) for _ in range(2)]
)
INPUTS = torch.zeros(8, 32)


@cache
def graph() -> Graph:
    return record_graph(LAYERS, first_microbatch(INPUTS, 4))


def plan_text(
    preset: str = "p3.16xlarge",
    num_microbatches: int = 4,
    sharding: str = "auto",
    factor: float = 1.0,
) -> str:
    task = MeshTask(
        model=Model(facts_of(LAYERS), LAYERS.spans),
        names=[step.path for step in LAYERS],
        graph_of=lambda _: graph(),
        cluster=Cluster.load(preset),
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
    [{"preset": "dgx-a100"}, {"num_microbatches": 8}, {"sharding": "data"}, {"factor": 2.0}],
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


MODEL = gpt(num_layers=2, width=16, num_heads=2, num_words=16, max_length=8)
WORDS = torch.zeros(8, 8, dtype=torch.long)


@pytest.fixture
def planned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that are not read but made."""
    found: list[Plan] = []

    def plan_and_tell(task: MeshTask) -> Plan:
        found.append(plan_on_meshes(task))
        return found[-1]

    monkeypatch.setattr("penstock.automatic.parallelize.plan_on_meshes", plan_and_tell)
    return found


def test_the_plan_of_the_same_question_is_read(planned: list[Plan]) -> None:
    own = cluster(2)
    assert plan_for(MODEL, WORDS, own) == plan_for(MODEL, WORDS, own) == planned[0]
    assert len(planned) == 1
    others: list[dict[str, Any]] = [
        {"num_microbatches": 2},
        {"sharding": "data"},
        {"num_layers": 2},
    ]
    for other in others:
        plan_for(MODEL, WORDS, own, **other)
    plan_for(MODEL, WORDS[:4], own)
    plan_for(MODEL, WORDS, cluster(2, far=1e6))
    assert len(planned) == 6


def test_a_damaged_plan_is_made_again(planned: list[Plan], tmp_path: Path) -> None:
    plan_for(MODEL, WORDS, cluster(2))
    (file,) = (tmp_path / "penstock" / "plans").iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    plan_for(MODEL, WORDS, cluster(2))
    assert plan_for(MODEL, WORDS, cluster(2)) == planned[0] == planned[1]
    assert len(planned) == 2


def test_a_plan_that_was_cut_short_is_not_kept(
    planned: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []

    def look(*args: Any) -> None:
        looked.append(args)
        if len(looked) == 2:
            raise KeyboardInterrupt
        _look(*args)

    monkeypatch.setattr("penstock.automatic.choose._look", look)
    part = plan_for(MODEL, WORDS, cluster(2))
    assert is_cut_short(part)
    whole = plan_for(MODEL, WORDS, cluster(2))
    assert not is_cut_short(whole)
    assert planned == [part, whole]


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
