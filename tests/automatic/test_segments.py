"""Stages that recompute each layer on its own: what they cost, keep, and are when they run."""

from dataclasses import replace
from functools import cache
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from benchmarks.alpa_paper.subjects import RESNET, subjects
from penstock.planner.make_plan import Choice, choose_on_meshes
from penstock.planner.mesh_costs import MemoryPolicy, MeshPrices
from penstock.planner.mesh_plans import find_on_meshes
from penstock.planner.mesh_task import MeshTask
from penstock.planner.plan import Plan
from penstock.planner.plan_page import layers_figure
from penstock.planner.plan_sharding import sharding_of
from penstock.planner.submeshes import Stage, Submesh
from penstock.schedules import Sizes, one_f_one_b, segmented
from penstock.schedules.memory import peak_bytes
from penstock.schedules.passes import add_recompute
from penstock.sharding.layouts import S
from penstock.trace.timeline import MemoryKind, most_bytes
from penstock.types import Recompute, Trace, Transport
from penstock_recipes.zoo import gpt
from tests.automatic.test_page import layers_of
from tests.few_devices import cluster
from tests.mesh_tasks import mesh_task, plan_on_meshes

BATCH, LENGTH, WIDTH, M = 16, 32, 128, 4
SEGMENTS, WHOLE = MemoryPolicy(recomputes=True, segments=True), MemoryPolicy(recomputes=True)
CROSSES = BATCH // M * LENGTH * WIDTH * 4
"""Bytes of a micro-batch between two blocks."""
ENTERS = BATCH // M * LENGTH * 8


@cache
def task_on(*hosts: int, num_layers: int = 4) -> MeshTask:
    with torch.device("meta"):
        model = gpt(
            num_layers=num_layers, width=WIDTH, num_heads=4, num_words=64, max_length=LENGTH
        )
        words = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    task = mesh_task(model, words, cluster(*hosts), M)
    return replace(task, policies=[SEGMENTS])


@cache
def chosen(*hosts: int) -> Choice:
    return choose_on_meshes(task_on(*hosts))


def prices(task: MeshTask, policy: MemoryPolicy) -> MeshPrices:
    """Return the costs by a memory policy."""
    given = task.graph_of(M), task.names, task.model.spans, task.cluster, M
    return MeshPrices(*given, task.shardings[0], policy)


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_a_stage_costs_what_its_layers_cost_as_stages_and_keeps_one_graph(shards: int) -> None:
    task, submesh = task_on(4), Submesh(0, 1, shards)
    cut = prices(task, SEGMENTS)
    alone = replace(cut, policy=WHOLE)
    ends = sorted({end for _, end in task.model.spans})
    assert len(ends) > 4, "no layer can be cut off"
    for start, end in combinations([0, *ends], 2):
        own = cut.on_mesh(start, end, submesh)
        assert own is not None
        inner = [n for n in ends if start < n < end]
        each = []
        for a, b in zip([start, *inner], [*inner, end], strict=True):
            every = alone.segments(Stage(a, b, submesh), own.shape)
            each += every
            assert (every[0].num_layers, len(every)) == (b - a, 1)
        assert cut.segments(Stage(start, end, submesh), own.shape) == each
        assert own.seconds == pytest.approx(sum(x.seconds for x in each))
        graph = max(x.graph_bytes for x in each)
        assert own.stay_bytes == pytest.approx(sum(x.state_bytes for x in each) + graph)
        entering = len([n for n in [start, *inner] if n]) * CROSSES / shards
        entering += 0 if start else ENTERS
        assert own.microbatch_bytes == entering


def test_a_plan_has_a_stage_for_each_segment_and_a_row_for_each_mesh() -> None:
    choice = chosen(1, 2)
    plan = choice.plan
    assert Plan.from_json(plan.to_json()) == plan
    assert set(plan.recompute) == {Recompute.STAGE}
    assert plan.schedule.name == "segmented" and set(plan.partition) == {1}
    assert [len(ranks[0]) for ranks in plan.placement.meshes] == [2, 1]
    _, *rows = plan.rows
    assert [row[0] for row in rows] == ["0-3", "4-6"]
    figure = layers_figure(plan, layers_of(task_on(1, 2), choice))
    assert len(figure.layout["yaxis"]["ticktext"]) == 2
    assert len(figure.layout["annotations"]) == 1
    sharding = sharding_of(plan, task_on(1, 2).graph_of(M), task_on(1, 2).names)
    assert [{*own.leaving.values()} for own in sharding.layers[:4]] == [{(S(0),)}] * 4
    assert any("limited by stage 0-3" in line for line in plan.why)
    assert "recompute each layer" in str(choice.candidates[0])


def test_wide_resnet_of_alpas_paper_fits_a_device_with_as_few_microbatches() -> None:
    subject = next(subjects((RESNET,)))
    plan = plan_on_meshes(subject.task("p3.16xlarge"))
    assert (subject.num_devices, plan.num_microbatches) == (1, subject.num_microbatches)
    assert plan.num_stages == len(plan.layers)


@pytest.mark.parametrize("family", ["one_f_one_b", "eager_1f1b", "gpipe"])
def test_what_a_mesh_keeps_is_no_less_than_its_schedule_does(family: str) -> None:
    task = replace(task_on(1, 2), families=[getattr(penstock.schedules, family)])
    (best, *_), _ = find_on_meshes(task)
    plan = best.plan
    own = [segment for of_stage in best.segments for segment in of_stage]
    sizes = Sizes(
        kept_bytes=tuple(round(x.graph_bytes) for x in own),
        input_bytes=tuple(round(x.microbatch_bytes) for x in own),
    )
    schedule = add_recompute(plan.schedule(plan.num_stages, M))
    assert plan.predicted_stages is not None
    for rank, kept in enumerate(peak_bytes(schedule, sizes)):
        stages = [n for n, place in enumerate(schedule.ranks) if place == rank]
        told = sum(plan.predicted_stages[n].kept_bytes for n in stages)
        entering = sum(own[n].microbatch_bytes for n in stages)
        assert told - entering <= kept <= told


def kept_bytes(**options: Any) -> int:
    """Give what a step in one process keeps at most."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Linear(256, 32)) for _ in range(6)]
    pipe = penstock.Pipeline(
        layers,
        loss=nn.functional.mse_loss,
        recompute=Recompute.STAGE,
        transport=Transport.LOOPBACK,
        trace=Trace.MEMORY,
        num_microbatches=4,
        **options,
    )
    pipe.train_step(torch.ones(16, 32), torch.ones(16, 32))
    assert pipe.last_timeline is not None
    kept = [m for m in pipe.last_timeline.memory if m.kind is MemoryKind.ACTIVATIONS]
    return most_bytes(kept, range(pipe.num_stages))


def test_with_segments_a_rank_is_measured_to_keep_less() -> None:
    whole = kept_bytes(partition=[3, 3], schedule=one_f_one_b)
    cut = kept_bytes(partition=[1] * 6, schedule=segmented((3, 3)))
    assert cut < whole / 2
