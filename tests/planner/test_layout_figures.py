"""The figures of given layouts: FLOPs, messages, memory, and the row of stages that are alike."""

from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock import Parallelism
from penstock.planner.layout_figures import (
    LayoutFigures,
    best_in_words,
    compared,
    layouts_page,
    rows_of,
)
from penstock.planner.stage_rows import MESH_HEADS
from penstock.trace.timeline import MemoryKind, MemorySample
from tests.few_devices import cluster
from tests.planner.test_parallelism import counted

WIDTH, NUM_LAYERS = 64, 8


def figures(where: penstock.Cluster, **words: Any) -> LayoutFigures:
    words = {"microbatch_size": 4, "num_microbatches": 4, **words}
    (own,) = compared({"mine": Parallelism(**words)}, counted(NUM_LAYERS), where)
    return own


@pytest.mark.parametrize(
    "words",
    [
        {},
        {"pipeline": 4, "recompute": "stage"},
        {"tensor": 2, "pipeline": 2, "virtual": 2, "recompute": "layers"},
        {"tensor": 2, "data": 1},
    ],
)
def test_mfu_counts_each_product_once_and_only_devices_with_a_stage(words: dict[str, Any]) -> None:
    own = figures(cluster(4), **words)
    samples = own.own.task.batch_size
    products = 3 * NUM_LAYERS - 1  # nothing before the first layer wants a gradient
    flops = products * 2 * samples * WIDTH**2
    peak = own.own.task.cluster.device_of(0).flops_per_s["float32"]
    used = words.get("tensor", 1) if words.get("data") == 1 else 4
    assert len(own.devices) == used and own.mfu is not None
    assert own.mfu * own.step_s * peak * used == pytest.approx(flops)
    assert own.unit == "samples" and own.rate == samples / own.step_s / used


@pytest.mark.parametrize("recompute", ["never", "stage"])
def test_a_step_without_its_collectives_does_not_depend_on_links(recompute: str) -> None:
    words = {"tensor": 2, "recompute": recompute, "schedule": "gpipe"}
    slow, fast = (figures(cluster(2, near=rate), **words) for rate in (1e8, 1e12))
    assert slow.step_s > 5 * fast.step_s and slow.between_stages_s == 0.0
    rest_s = fast.step_s - fast.collectives_s
    assert 0 < rest_s == pytest.approx(slow.step_s - slow.collectives_s)


@pytest.mark.parametrize("issue_s", [0.0, 1e-3])
def test_rows_of_devices_send_sums_of_gradients_however_slowly_a_host_issues(
    issue_s: float,
) -> None:
    """The gather of the model's output is hidden where the host issues more slowly."""
    own = figures(cluster(4, near=1e8, torch_type="cuda", issue_s=issue_s), data=4)
    (stage,) = own.own.stages
    num_bytes = NUM_LAYERS * (WIDTH * WIDTH + WIDTH) * 4
    gather_s = 0.0 if issue_s else 4 * 3 / 4 * (4 * 4 * WIDTH * 4) / 1e8  # of 4 micro-batches
    assert own.collectives_s == pytest.approx(stage.once_s + gather_s, rel=0.01)
    assert stage.once_s == pytest.approx(2 * 3 / 4 * num_bytes / 1e8, rel=0.05)


def test_a_pipeline_of_single_devices_has_messages_between_stages_only() -> None:
    own = figures(cluster(2, near=1e6), pipeline=2, data=1)
    assert own.collectives_s == 0.0
    num_bytes = 4 * WIDTH * 4  # of a micro-batch of 4 samples in float32
    assert own.between_stages_s == pytest.approx(4 * 2 * num_bytes / 1e6)


def test_tokens_count_where_the_inputs_are_words() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(7, 16), nn.Linear(16, 7))
        words = torch.zeros(2, 5, dtype=torch.long)
    profile = penstock.profile(model, words, measure=False, torch_type="cpu")
    layout = Parallelism(microbatch_size=2, num_microbatches=3)
    (own,) = compared({"mine": layout}, profile, cluster(1))
    assert own.unit == "tokens" and own.rate * own.step_s == pytest.approx(2 * 3 * 5)


def test_layouts_are_ordered_and_one_that_cannot_be_has_a_reason() -> None:
    layouts = {
        "odd": Parallelism(tensor=3, num_microbatches=1),
        "pipe": Parallelism(pipeline=4, microbatch_size=4, num_microbatches=8),
        "one": Parallelism(data=1, microbatch_size=4, num_microbatches=8),
    }
    found = compared(layouts, counted(NUM_LAYERS), cluster(4, near=1e15))
    assert [own.name for own in found] == ["pipe", "one", "odd"]
    heads, *rows = rows_of(found)
    assert heads[-1] == "why not" and rows[-1][1:-1] == ("-",) * (len(heads) - 2)
    assert "= 3 devices, which do not divide the 4 of few" in rows[-1][-1]
    share = 1 - found[0].step_s / found[1].step_s
    assert best_in_words(found).startswith("pipe is the fastest of 2 layouts that fit: ")
    assert f"{share:.1%} less than one" in best_in_words(found)
    assert "batches differ" not in best_in_words(found)
    assert rows_of(found[:2])[0][-1] == "batch"  # no column of reasons


def test_what_does_not_fit_is_not_the_best() -> None:
    layouts = {
        "all": Parallelism(data=1, microbatch_size=4, num_microbatches=8, schedule="gpipe"),
        "less": Parallelism(pipeline=4, microbatch_size=4, num_microbatches=1),
    }
    both = {own.name: own for own in compared(layouts, counted(NUM_LAYERS), cluster(4))}
    room = both["less"].peak_bytes
    assert room < both["all"].peak_bytes
    tight = cluster(4, memory_bytes=room)
    found = compared(layouts, counted(NUM_LAYERS), tight, memory_share=1.0)
    assert {own.name: own.fits for own in found} == {"less": True, "all": False}
    assert best_in_words(found).startswith("less is the fastest of 1 layout that fit")
    none = compared(layouts, counted(NUM_LAYERS), tight)
    assert best_in_words(none).startswith("No layout fits the memory")


def test_memory_is_shown_by_kind_where_the_timeline_has_it() -> None:
    own = figures(cluster(2), pipeline=2, data=1)
    sizes = {MemoryKind.WEIGHTS: 3 << 20, MemoryKind.ACTIVATIONS: 5 << 20}
    samples = tuple(MemorySample(1, 0.0, size, kind) for kind, size in sizes.items())
    timeline = own.own.timeline
    object.__setattr__(timeline, "memory", samples)
    assert own.peak_bytes == 8 << 20 and dict(own.peak_by_kind) == sizes
    assert own.cells["memory"] == "8 MiB (activations 5 MiB, weights 3 MiB)"
    titles = [part.title for part in layouts_page("m", cluster(2), [own]).sections]
    assert titles == ["Layouts", "Timelines", "Memory", "Words of the layouts", "Cluster"]


@pytest.mark.parametrize(
    ("schedule", "num_stages", "wanted"),
    [
        ("gpipe", 2, ["0", "1"]),
        ("gpipe", 8, ["0", "1 to 6", "7"]),  # the ends have less to do
        ("1f1b", 8, [str(n) for n in range(8)]),  # each keeps another number of micro-batches
        ("1f1b", 32, ["0 to 31"]),
    ],
)
def test_stages_that_are_alike_share_a_row(
    schedule: str, num_stages: int, wanted: list[str]
) -> None:
    layout = Parallelism(pipeline=num_stages, num_microbatches=64, schedule=schedule, data=1)
    plan = penstock.plan(counted(32, 1), cluster(32), parallelism=layout)
    heads, *rows = plan.rows
    assert heads == MESH_HEADS and [row[0] for row in rows] == wanted
    if len(rows) == 1:
        own = dict(zip(heads, rows[0], strict=True))
        assert own["layers"] == "1 each: 0 to 31" and own["parameters"] == "4,160"
        assert own["devices"] == "0-31 of host0"
        assert own["activations"] == "256 bytes to 8 KiB"  # of 1 to 32 micro-batches
        assert own["to the next"] == "256 bytes"
