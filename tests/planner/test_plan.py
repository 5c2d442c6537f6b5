"""A plan as a value: printed, compared, written as JSON and read back."""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from fractions import Fraction
from math import inf, nan
from pathlib import Path
from typing import Any

import numpy
import pytest

from penstock.costs.cluster import Cluster
from penstock.costs.layer_facts import LayerFacts
from penstock.errors import ConfigError, PartitionError, PlanError, UnreadableError
from penstock.plain_values import from_json, to_json
from penstock.planner.placement import Placement
from penstock.planner.plan import BalancedBy, Plan
from penstock.planner.stage_rows import PredictedStage
from penstock.planner.unsplit import Unsplit, divides_backwards
from penstock.schedules import (
    ALL_SCHEDULES,
    Family,
    Schedule,
    from_csv,
    gpipe,
    interleaved_1f1b,
    to_csv,
    zb_h1,
)
from penstock.schedules.costs import Costs
from penstock.schedules.names import family_of
from penstock.sharding.layouts import R, S
from penstock.sharding.request import ShardingRequest
from penstock.types import Recompute, TiedGradients, Transport
from tests.every_schedule import divided
from tests.planner.plans import layers, plan

ODD = Plan(
    layers=(LayerFacts.of('a "b"\n', "Ünïcode", 3, {}), *layers(3)),
    partition=(1, 1, 1, 1),
    schedule=interleaved_1f1b(2),
    num_microbatches=7,
    recompute=(Recompute.NEVER, Recompute.STAGE, Recompute.layers(2), Recompute.STAGE),
    placement=Placement.of((0, 1, 0, 1), 3, ["cuda:0", "cuda:1", "cpu", "cuda"], num_shards=2),
    sharding="megatron",
    offload=(True, False, False, True),
    offload_folder="/a folder",
    tied_gradients=TiedGradients.SUMMED,
    gradient_dtype="float32",
    batch_norm_over_replicas=True,
    seed=-(2**80),
    threads_per_stage=3,
    transport=Transport.LOOPBACK,
    timeout_s=0.1 + 0.2,
    balanced_by=BalancedBy.TIME,
    predicted_s=(1e-9, 2.0, 1 / 3, 0.0),
    memory_limit_bytes=(10**12, 0),
    predicted_peak_bytes=(7, 0),
    unsplit=(Unsplit(1, "90% of its weights: why"),),
    batch_size=99,
    predicted_step_s=0.7,
    why=("it is the fastest",),
    cluster=Cluster.load("p3.16xlarge"),
    predicted_stages=(PredictedStage(1e-9, 2.0, 1 / 3, 10**12, 7, 0),) * 4,
    layer_factors=(0.1 + 0.2, 1.0, 1e9, 7.0),
)
"""A plan with no field at its default."""


def test_every_field_survives_json() -> None:
    assert Plan.from_json(ODD.to_json()) == ODD
    usual = plan(1, 2)
    same = [f.name for f in fields(Plan) if getattr(usual, f.name) == getattr(ODD, f.name)]
    assert same == []
    assert Plan.from_json(usual.to_json()) == usual


def test_a_schedule_that_was_read_from_csv_stands_in_the_file() -> None:
    plan = replace(ODD, schedule=from_csv(to_csv(interleaved_1f1b(2)(4, 7))))
    read = Plan.from_json(plan.to_json())
    assert read == plan and read.schedule(4, 6) == plan.schedule(4, 6)


@pytest.mark.parametrize(
    "costs",
    (
        Costs(forward_s=1, backward_s=0.1, recompute_s=Fraction(1, 3)),
        Costs(forward_s=1, backward_s=2),
        Costs(
            forward_s=(1, 2.5, Fraction(2, 7)),
            backward_s=2,
            recompute_s=(0, 0, 0),
            transfer_s={(1, 2): Fraction(1, 2), (0, 1): 0.25},
            backward_weight_s=(10, 0, 2**60 + 1),
        ),
    ),
)
def test_costs_survive_json_exactly(costs: Costs) -> None:
    read = from_json(Costs, to_json(costs))
    assert (read, repr(read), hash(read)) == (costs, repr(costs), hash(costs))
    assert eval(repr(costs)) == costs


@pytest.mark.parametrize(
    ("change", "message"),
    (
        ({"forward_s": "1/0"}, 'forward_s must be a finite number, or a fraction as "1/3"'),
        ({"forward_s": True}, "forward_s must be a finite number"),
        ({"forward_s": {}}, "forward_s must be a finite number, and is {}"),
        ({"transfer_s": [[[0], 1]]}, r"transfer_s\[0\]\[0\] must be a list of 2, and is \[0\]"),
        ({"recompute_s": [1, None]}, r"recompute_s\[1\] must be a finite number, and is null"),
    ),
)
def test_costs_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    written = json.loads(to_json(Costs(forward_s=1, backward_s=2, recompute_s=1)))
    with pytest.raises(UnreadableError, match=message):
        from_json(Costs, json.dumps(written | change))


def test_a_seed_of_numpy_survives_json_and_another_than_a_whole_number_is_refused() -> None:
    seeds: list[Any] = [numpy.int64(3), 1.5]
    assert Plan.from_json(replace(ODD, seed=seeds[0]).to_json()).seed == 3
    with pytest.raises(ConfigError, match=r"seed=1\.5; it must be a whole number"):
        replace(ODD, seed=seeds[1])


def test_lists_are_tuples_in_a_plan_as_they_are_in_its_json() -> None:
    lists: Any = list
    made = replace(ODD, partition=lists(ODD.partition), recompute=lists(ODD.recompute))
    assert made == ODD


@pytest.mark.parametrize("factor", [inf, nan, 0.0, -1.0])
def test_a_layer_cannot_take_so_many_times_its_estimate(factor: float) -> None:
    with pytest.raises(ConfigError, match="give a finite number above 0 for each layer"):
        replace(ODD, layer_factors=(1.0, factor, 1.0, 1.0))


def test_a_way_to_divide_stages_and_shards_come_together() -> None:
    for changes in ({"sharding": None}, {"placement": Placement.of((0, 1, 0, 1))}):
        with pytest.raises(PlanError, match="give a name of a ready plan with init_mesh"):
            replace(ODD, **changes)


def test_pins_are_read_from_a_mapping_and_written_as_data() -> None:
    given: Any = {"plan": "data", "a.*": (S(0), R), "b": "R", "memory_limit_bytes": 2**30}
    pinned = replace(ODD, sharding=given)
    assert Plan.from_json(pinned.to_json()) == pinned
    wanted = ShardingRequest("data", {"a.*": "S(0)·R", "b": "R"}, 2**30)
    assert pinned.sharding == wanted
    assert f"sharding={wanted}" in str(pinned)


def test_a_file_holds_a_plan(tmp_path: Path) -> None:
    ODD.save(tmp_path / "plan.json")
    assert Plan.load(str(tmp_path / "plan.json")) == ODD


def test_a_printed_plan_has_made_no_schedule_of_its_size() -> None:
    asked = []

    def build(num_stages: int, num_microbatches: int) -> Schedule:
        asked.append(num_microbatches)
        return zb_h1()(num_stages, num_microbatches)

    large = replace(plan(2, 1), schedule=Family("zb_h1", build), num_microbatches=10**6)
    assert "backwards in two parts" in str(large)
    assert asked
    assert max(asked) < 100


@pytest.mark.parametrize("family", ALL_SCHEDULES, ids=repr)
@pytest.mark.parametrize("num_microbatches", (1, 2, 8, 40))
def test_a_printed_plan_says_whether_its_schedule_divides_backwards(
    family: Family, num_microbatches: int
) -> None:
    text = str(replace(plan(2, 1), schedule=family, num_microbatches=num_microbatches))
    divides = divides_backwards(family(2, num_microbatches))
    assert ("backwards in two parts" in text) is divides


def test_a_printed_plan_is_a_table() -> None:
    text = str(replace(plan(2, 1), predicted_s=(0.002, 0.001)))
    assert text == "\n".join(
        [
            "3 layers as 2 stages x 1 replica on 2 ranks, 6 micro-batches",
            "schedule=one_f_one_b, recompute=STAGE, seed 0, 1 thread per stage",
            "layers as given",
            "stage  layers     parameters  recompute  ranks  device  micro-batch",
            "    0  2: 0 to 1          40  stage          0  cpu     2 ms",
            "    1  1: 2               20  stage          1  cpu     1 ms",
        ]
    )


def changed(**changes: Any) -> str:
    """Write a plan as JSON with some of its keys changed."""
    return json.dumps(json.loads(plan(1, 2).to_json()) | changes)


def without(key: str) -> str:
    """Write a plan as JSON without one of its keys."""
    data = json.loads(plan(1, 2).to_json())
    del data[key]
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "damaged, or no JSON"),
        (plan(1, 2).to_json()[:-20], "damaged, or no JSON"),
        ("[" * 100_000, "damaged, or no JSON"),
        ("[]", r"it must be an object, and is \[\]"),
        (changed(stages=2), "unknown key stages; known are layers, partition"),
        (changed(layers=[{"nmae": "0"}]), r"unknown key layers\[0\].nmae; known are name"),
        (without("schedule"), "lacks schedule"),
        (changed(partition=[1, "2"]), r"partition\[1\] must be a whole number, and is \"2\""),
        (changed(partition=[1, 2.0]), r"partition\[1\] must be a whole number, and is 2.0"),
        (changed(partition=3), "partition must be a list, and is 3"),
        (changed(num_microbatches=True), "num_microbatches must be a whole number, and is true"),
        (changed(num_microbatches=0), "num_microbatches=0; it must be .* at least 1"),
        (changed(timeout_s=float("nan")), "timeout_s must be a finite number, and is NaN"),
        (changed(timeout_s=10**400), "timeout_s must be a finite number, and is 1000"),
        (changed(timeout_s=-1), "timeout_s=-1.0; it must be .* above 0"),
        (changed(recompute=["stage", "maybe"]), r'recompute\[1\] must be "stage" or "never"'),
        (changed(recompute=["stage", ["stage"]]), r"recompute\[1\] must be"),
        (changed(recompute=["stage"]), "2 stages has recompute for 1"),
        (changed(predicted_s=[1.0]), "2 stages has predicted_s for 1"),
        (changed(layer_factors=[1.0]), r"layer_factors=\(1.0,\) of a plan with 3 layers; give a"),
        (changed(layer_factors=[1.0, 0.0, 1.0]), "give a finite number above 0 for each layer"),
        (changed(sharding=[]), "sharding must be a string"),
        (changed(sharding={"weight": {}}), "unknown key sharding.weight; known are plan, weights"),
        (changed(sharding={"weights": {"a": "C"}}), r"pins 'a' to 'C'; a weight at rest is 'I'"),
        (changed(schedule="gpipe"), 'schedule must be an object, and is "gpipe"'),
        (changed(schedule={"name": "gpip", "arguments": {}}), "no schedule 'gpip'; choose one"),
        (changed(schedule={"name": "gpipe", "arguments": {"v": 2}}), "gpipe takes the arguments"),
        (changed(placement={"ranks": [[[0]]], "devices": ["cpu"]}), "placement.ranks for 1"),
        (
            changed(placement={"ranks": [[[1]], [[0]]], "devices": ["cpu", "cpu"]}),
            r"one_f_one_b runs the stages on ranks \[0, 1\], and the placement has .* \[1, 0\]",
        ),
    ],
)
def test_a_file_that_is_no_plan_is_one_clear_line(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as raised:
        Plan.load(path)
    assert str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_partition_of_other_layers_is_refused() -> None:
    with pytest.raises(PartitionError, match="holds 4 layers, the model has 3"):
        replace(plan(1, 2), partition=(2, 2))


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (lambda path: None, "cannot read the plan"),
        (lambda path: path.mkdir(), "cannot read the plan"),
        (lambda path: path.write_bytes(b"\xff\xfe"), "no text in UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    prepare: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    prepare(tmp_path / "plan.json")
    with pytest.raises(PlanError, match=rf"(?s)(plan\.json.*{words}|{words}.*plan\.json)"):
        Plan.load(tmp_path / "plan.json")


def test_a_plan_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot write the plan"):
        plan(1).save(tmp_path / "missing" / "plan.json")

    def own(num_stages: int, num_microbatches: int) -> Schedule:
        return gpipe(num_stages, num_microbatches)

    with pytest.raises(PlanError, match="schedule own is a function of your own"):
        plan(1, 1, schedule=family_of(own, 6)).save(tmp_path / "plan.json")
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ((*layers(1), LayerFacts.of("head", "Tanh", 0, {}), *layers(3)[2:]), "layer 1 is '1'"),
        (
            (*layers(2), LayerFacts.of("2", "Linear", 20, {"weight": (5, 4)})),
            r"parameters of layer 2, '2' \(Linear\), have other names or shapes",
        ),
        (layers(2), r"3 layers and the model 2; layer 2, '2' \(Linear\), is in the plan only"),
        (layers(4), r"layer 3, '3' \(Linear\), is in the model only"),
    ],
)
def test_the_first_layer_that_differs_is_named(found: tuple[LayerFacts, ...], words: str) -> None:
    planned = plan(1, 2)
    planned.check_model(layers(3))
    with pytest.raises(PlanError, match=f"of another model: .*{words}"):
        planned.check_model(found)


def test_a_plan_for_other_ranks_says_how_many_it_is_for() -> None:
    plan(1, 2).check_ranks(1)
    plan(1, 2).check_ranks(2, 2)
    ODD.check_ranks(12, 2)
    with pytest.raises(
        PlanError, match=r"for 2 ranks, 2 for each replica.*has 4 processes; start"
    ):
        plan(1, 2).check_ranks(4)
    with pytest.raises(
        PlanError, match=r"for 12 ranks, 4 for each replica.*has 1 process; start 12"
    ):
        ODD.check_ranks(1)
    with pytest.raises(PlanError, match=r"has 12 processes, with 3 ranks for each replica"):
        ODD.check_ranks(12, 3)


def test_a_plan_says_which_layers_are_not_split_where_backwards_are_divided() -> None:
    why = (Unsplit(1, "90% of its weights: why"),)
    whole = replace(plan(1, 2), unsplit=why)
    assert "one part" not in str(whole)
    parts = replace(whole, schedule=family_of(divided, num_microbatches=1))
    assert "backward in one part: layer '1' (Linear), 90% of its weights: why" in str(parts)
    assert "backwards in two parts: all layers" in str(replace(parts, unsplit=()))
    assert "in two parts: the first step shows which" in str(replace(parts, unsplit=None))
    for layer in (-1, 4):
        with pytest.raises(PlanError, match=f"unsplit names layer {layer}, and there are 3"):
            replace(parts, unsplit=(Unsplit(layer, "why"),))
