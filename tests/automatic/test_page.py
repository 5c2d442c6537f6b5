"""The page of a plan on sub-meshes shows each layer on its mesh, and each weight's layout."""

import json
import re
from functools import cache
from html import escape, unescape
from itertools import accumulate
from typing import Any

import pytest
import torch

import penstock
from penstock.planner.make_plan import Choice, choose_on_meshes
from penstock.planner.mesh_task import MeshTask
from penstock.planner.plan import Plan
from penstock.planner.plan_page import (
    DrawnLayer,
    DrawnWeight,
    drawn_layers,
    folded_rows,
    layers_figure,
    plan_page,
    weights_table,
)
from penstock.planner.plan_sharding import sharding_of
from penstock.planner.stage_rows import MESH_HEADS
from penstock.sharding.layouts import I, Layout, R, S
from penstock.trace.page import Page, Section, render_page
from penstock.trace.units import bytes_text, time_text
from penstock_recipes.zoo import gpt
from tests.few_devices import cluster
from tests.mesh_tasks import mesh_task
from tests.trace.page.pages import WICKED

BATCH, LENGTH, WIDTH = 16, 32, 128
FLOAT_BYTES = 4


@cache
def chosen(*hosts: int, num_microbatches: int = 4, sharding: str = "auto") -> Any:
    with torch.device("meta"):
        model = gpt(num_layers=3, width=WIDTH, num_heads=4, num_words=64, max_length=LENGTH)
        words = torch.zeros(BATCH, LENGTH, dtype=torch.long)
    where: penstock.Cluster = cluster(*hosts)
    task = mesh_task(model, words, where, num_microbatches, sharding)
    return task, choose_on_meshes(task)


def layers_of(task: MeshTask, choice: Choice) -> list[DrawnLayer]:
    plan, graph = choice.plan, task.graph_of(choice.plan.num_microbatches)
    sharding = sharding_of(plan, graph, task.names) if plan.sharding else None
    return drawn_layers(plan, graph, task.names, sharding)


def test_the_table_has_for_each_stage_its_mesh_times_and_bytes() -> None:
    _, choice = chosen(1, 2)
    plan = choice.plan
    heads, *rows = plan.rows
    assert heads == MESH_HEADS and len(rows) == plan.num_stages == 2
    first, second = (dict(zip(heads, row, strict=True)) for row in rows)
    assert (first["devices"], second["devices"]) == ("0 of host0", "1-2 of host1")
    assert (first["mesh"], second["mesh"]) == ("1", "2")
    assert first["layers"].startswith(f"{plan.partition[0]}: embedding to ")
    assert second["layers"].endswith(" to head")
    sent_bytes = BATCH // 4 * LENGTH * WIDTH * FLOAT_BYTES
    assert first["to the next"] == bytes_text(sent_bytes) and second["to the next"] == "-"
    state = [layer.num_parameters for layer in plan.layers[: plan.partition[0]]]
    assert plan.predicted_stages[0].state_bytes == sum(state) * FLOAT_BYTES * 4
    for row, own in zip((first, second), plan.predicted_stages, strict=True):
        assert row["forward"] == time_text(own.forward_s) and row["activations"] != "0 bytes"
        assert own.forward_s < own.backward_s
    assert str(Plan.from_json(plan.to_json())) == str(plan)


def test_it_says_what_other_decisions_would_have_cost() -> None:
    _, choice = chosen(1, 2)
    told = [line for line in choice.plan.why if line.startswith("with other ")]
    heads = (line.split(":")[0].removeprefix("with other ") for line in told)
    decided = {name for head in heads for name in head.split(", ")}
    assert decided == {"stages", "schedule", "sharding", "recompute"}
    best = choice.candidates[0]
    (line,) = (line for line in told if "schedule" in line)
    assert f": {best.family.name}, " not in line and best.stages_text in line
    assert all(float(re.findall(r"\(([-+.\d]+)%\)", line)[0]) >= 0 for line in told)
    slowest = max(range(2), key=choice.plan.predicted_s.__getitem__)
    assert any(line.startswith(f"limited by stage {slowest}, ") for line in choice.plan.why)


@pytest.mark.parametrize("hosts", [(1, 2), (2, 2), (3,)])
def test_a_block_is_as_high_as_its_mesh_and_each_layer_has_one(hosts: tuple[int, ...]) -> None:
    task, choice = chosen(*hosts)
    plan = choice.plan
    figure = layers_figure(plan, layers_of(task, choice))
    blocks = {
        n: (base, height)
        for trace in figure.data
        for n, base, height in zip(trace["x"], trace["base"], trace["y"], strict=True)
    }
    assert sorted(blocks) == list(range(len(plan.layers)))
    assert sum(len(trace["x"]) for trace in figure.data) == len(plan.layers)
    sizes = [len(ranks[0]) for ranks in plan.placement.ranks]
    tops = accumulate(sizes, initial=0)
    start = 0
    for size, top, count in zip(sizes, tops, plan.partition, strict=False):
        for n in range(start, start + count):
            base, height = blocks[n]
            assert top < base and base + height < top + size
            assert height == pytest.approx(size, abs=0.2)
        start += count
    links = [note["text"] for note in figure.layout["annotations"]]
    assert len(links) == plan.num_stages - 1
    for text, own in zip(links, plan.predicted_stages, strict=False):
        assert f"{bytes_text(own.sent_bytes)} a micro-batch" in text


def test_a_stage_of_two_axes_has_layouts_along_both() -> None:
    task, choice = chosen(4, num_microbatches=1, sharding="grid")
    layers = layers_of(task, choice)
    assert choice.plan.placement.shard_axes == (2, 2)
    rows = weights_table(layers).rows
    planned = sharding_of(choice.plan, task.graph_of(1), task.names)
    widen = planned.layers[1].weights["feed_forward.widen.weight"]
    assert widen == (R, S(0))
    (own,) = (row for row in rows if "feed_forward.widen.weight" in row[4])
    assert own[2:4] == ("R·S(0)", "gradients summed x by rows")
    assert layers[1].cuts == "gradients summed x by columns and by rows"
    blocks = [row[1] for row in rows if "blocks" in row[1]]
    assert blocks == ["3: blocks.0 to blocks.2"]  # alike, so once


def weight(layout: Layout, *shape: int) -> DrawnWeight:
    num_bytes = FLOAT_BYTES * torch.Size(shape).numel()
    return DrawnWeight("w", shape, num_bytes, layout)


@pytest.mark.parametrize(
    ("weights", "cuts"),
    [
        ((), "without weights"),
        ((weight((), 8, 8),), "on one device"),
        ((weight((I, I), 8, 8),), "whole"),
        ((weight((R,), 8, 8), weight((S(0),), 8)), "gradients summed"),
        ((weight((S(0),), 4, 8, 8), weight((R,), 8)), "by experts"),
        ((weight((S(1),), 8, 8), weight((S(0),), 8, 8)), "by columns and by rows"),
        ((weight((S(2),), 8, 8, 3, 3),), "along dimension 2"),
    ],
)
def test_a_colour_says_how_most_of_a_layers_weights_are_cut(
    weights: tuple[DrawnWeight, ...], cuts: str
) -> None:
    assert DrawnLayer(0, "layer", weights, 0, 0).cuts == cuts


def test_a_page_has_all_parts_and_the_timeline() -> None:
    _, choice = chosen(1, 2)
    text = render_page(plan_page(choice))
    for title in ("Layers by stages", "Timeline", "Weights", "Candidates", "Plan", "Cluster"):
        assert f"<h2>{title}</h2>" in text
    said = unescape(text)
    assert all(part in said for line in choice.plan.why for part in line.split("; "))
    assert f"The fastest of {len(choice.candidates)}" in said


def test_candidates_that_differ_in_stages_and_schedule_alone_share_a_row() -> None:
    def row(stages: str, schedule: str, step: str) -> tuple[str, ...]:
        return (stages, "1", "4", schedule, "never", step, "10", "1 MiB", "")

    rows = [row("2", "gpipe", "1 ms"), *(row(str(n), "gpipe", "2 ms") for n in range(3, 9))]
    rows += [row("3", "zb_h1", "2 ms"), row("1", "gpipe", "9 ms")]
    rows += [row(f"11 layers on {n}", "gpipe", "8 ms") for n in (2, 3)]
    folded = folded_rows(rows)
    assert [(x[0], x[3], x[5]) for x in folded] == [
        ("2", "gpipe", "1 ms"),
        ("3, 4, 5, 6 and 2 more", "gpipe, zb_h1", "2 ms"),
        ("1", "gpipe", "9 ms"),
        ("11 layers on 2, 3", "gpipe", "8 ms"),
    ]


def test_names_do_not_break_out_of_the_page() -> None:
    _, choice = chosen(1, 2)
    num_layers = len(choice.plan.layers)
    own = DrawnWeight(WICKED, (8, 8), 256, (R,))
    layers = [DrawnLayer(1, WICKED, (own,), 1, 2)] * num_layers
    figure, table = layers_figure(choice.plan, layers), weights_table(layers)
    text = render_page(Page("page", sections=(Section("plan", (figure, table)),)))
    assert WICKED not in text
    found = re.search(r'id="figures">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    drawn = json.loads(found[1])["layers"]
    assert set(drawn["layout"]["xaxis"]["ticktext"]) == {escape(WICKED)}
    assert all(escape(WICKED) in told for told in drawn["data"][0]["customdata"])
    assert not any(WICKED in told for told in drawn["data"][0]["customdata"])
