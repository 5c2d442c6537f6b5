"""Stages and replicas are fitted to the processes that are there, and share out every batch."""

import json
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.microbatches import microbatch_sizes
from penstock_recipes.errors import RecipeError
from penstock_recipes.recipe.cookbook import find_recipe
from penstock_recipes.recipe.read import read_recipe, recipe_to_toml
from penstock_recipes.recipe.recipe import Recipe
from penstock_recipes.train.layout import check_layout, refit, replica_share, smallest_microbatch
from tests.digits import DIGITS

NUM_LAYERS = 11
INTERLEAVED = ("pipeline.schedule=interleaved_1f1b", "pipeline.stages_per_rank=2")


def recipe(stages: int, replicas: int, *changes: str) -> Recipe:
    layout = (f"pipeline.num_stages={stages}", f"pipeline.num_replicas={replicas}")
    return read_recipe(DIGITS, [*layout, *changes])


@pytest.mark.parametrize(
    ("before", "world", "after"),
    [
        ((2, 2), 4, (2, 2)),
        ((2, 2), 2, (1, 2)),  # the number of replicas decides rounding, so it stays
        ((2, 2), 3, (3, 1)),
        ((2, 2), 6, (3, 2)),
        ((2, 2), 1, (2, 1)),  # one process, a thread for each stage
        ((4, 1), 2, (2, 1)),
        ((1, 4), 2, (1, 2)),
        ((1, 4), 12, (3, 4)),
        ((2, 8), 12, (3, 4)),
        # with several stages a process, as many
        *(((4, 1, *INTERLEAVED), 2, (4, 1)), ((8, 1, *INTERLEAVED), 2, (4, 1))),
        *(((4, 2, *INTERLEAVED), 8, (8, 2)), ((4, 1, *INTERLEAVED), 1, (4, 1))),
    ],
)
def test_a_run_goes_on_with_the_processes_that_are_there(before, world, after) -> None:
    found = refit(recipe(*before), world, NUM_LAYERS).pipeline
    assert (found.num_stages, found.num_replicas) == after
    assert found.stages_per_rank == (2 if len(before) > 2 else 1)


def test_processes_that_cannot_share_the_work_are_told_why() -> None:
    with pytest.raises(RecipeError, match=r"13 processes cannot go on .* has 11 layers"):
        refit(recipe(2, 1), 13, NUM_LAYERS)


def test_several_stages_a_process_take_fewer_processes() -> None:
    check_layout(recipe(4, 2, *INTERLEAVED), 4)
    said = "num_stages = 4 / pipeline.stages_per_rank = 2 x .* are 4 processes, but 8 were"
    with pytest.raises(RecipeError, match=said):
        check_layout(recipe(4, 2, *INTERLEAVED), 8)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ((*INTERLEAVED[:1], "pipeline.stages_per_rank=1"), "is 1; make it 2 or more"),
        (INTERLEAVED[1:], "gpipe runs one stage on each rank, and stages per rank is 2"),
        ((*INTERLEAVED[:1], "pipeline.stages_per_rank=3"), "4 stages, 3 per rank, leave a rank"),
    ],
)
def test_stages_a_rank_must_fit_the_schedule(changes: tuple[str, ...], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        recipe(4, 1, *changes)


@pytest.mark.parametrize(
    ("schedule", "per_rank"), [("zb_v", 2), ("interleaved_1f1b", 2), ("zb_h1", 1)]
)
def test_stages_a_rank_left_out_are_as_few_as_the_schedule_has(schedule, per_rank) -> None:
    found = recipe(4, 1, f"pipeline.schedule={schedule}").pipeline
    assert (found.stages_per_rank, found.num_ranks) == (per_rank, 4 // per_rank)


@pytest.mark.parametrize(
    ("before", "schedule", "per_rank"),
    [(2, "one_f_one_b", 1), (1, "zb_v", 2), (4, "breadth_first", 4), (4, "zb_v", 2)],
)
def test_another_schedule_keeps_the_stages_a_rank_that_suit_it(
    tmp_path: Path, before: int, schedule: str, per_rank: int
) -> None:
    path = tmp_path / "recipe.toml"
    ran = "gpipe" if before == 1 else "interleaved_1f1b"
    layout = (f"pipeline.schedule={ran}", f"pipeline.stages_per_rank={before}")
    path.write_text(recipe_to_toml(recipe(4, 1, *layout)))
    found = read_recipe(path, [f"pipeline.schedule={schedule}"]).pipeline
    assert (found.schedule, found.stages_per_rank) == (schedule, per_rank)
    with pytest.raises(RecipeError, match=r"3 per rank|per rank is 3"):
        read_recipe(path, [f"pipeline.schedule={schedule}", "pipeline.stages_per_rank=3"])


def test_a_partition_goes_with_its_number_of_stages() -> None:
    old = recipe(2, 1, "pipeline.partition=[5, 6]")
    assert refit(old, 2, NUM_LAYERS).pipeline.partition == (5, 6)
    assert refit(old, 3, NUM_LAYERS).pipeline.partition == "auto"


@pytest.mark.parametrize(
    ("stages", "replicas", "world", "said"),
    [
        *((2, 1, 1, ""), (3, 1, 3, ""), (2, 2, 4, "")),
        (2, 2, 1, "4 processes, and this is one; start them with --num-processes 4"),
        (2, 2, 3, "are 4 processes, but 3 were started; start 4"),
        (2, 1, 4, "are 2 processes, but 4 were started"),
    ],
)
def test_a_layout_fits_or_says_what_would(stages, replicas, world, said) -> None:
    with pytest.raises(RecipeError, match=said) if said else nullcontext():
        check_layout(recipe(stages, replicas), world)


@given(
    st.integers(1, 5).flatmap(
        lambda d: st.tuples(st.integers(d, 60), st.integers(1, 6).map(lambda n: n * d), st.just(d))
    )
)
def test_replicas_take_whole_micro_batches_in_order(case: tuple[int, int, int]) -> None:
    num_samples, num_microbatches, num_replicas = case
    shares = [replica_share(*case, replica) for replica in range(num_replicas)]
    assert shares[0].start == 0 and shares[-1].stop == num_samples
    assert all(a.stop == b.start for a, b in pairwise(shares))
    sizes = [microbatch_sizes(s.stop - s.start, num_microbatches // num_replicas) for s in shares]
    assert [n for part in sizes for n in part] == microbatch_sizes(num_samples, num_microbatches)


def test_a_last_batch_smaller_than_the_replicas_is_refused() -> None:
    wanted = recipe(1, 4, "train.batch_size=8")
    assert smallest_microbatch(wanted, 20) == 1  # four samples are left for the last step
    with pytest.raises(RecipeError, match=r"leaves 2 of 18 samples .* fewer than the 4 replicas"):
        smallest_microbatch(wanted, 18)


@pytest.mark.parametrize(
    ("before", "world", "after"),
    [
        ((1, 2, "2"), 4, (1, 2, 2)),
        ((1, 2, "2"), 2, (1, 2, 1)),  # fewer shards before fewer replicas
        ((2, 1, "[2, 2]"), 4, (1, 1, 4)),
        ((1, 1, "[2, 2]"), 2, (1, 1, 2)),
        ((1, 1, "4"), 3, (3, 1, 1)),
        ((2, 2, "2"), 1, (2, 1, 1)),
    ],
)
def test_shards_are_kept_or_divided(before, world, after, tmp_path) -> None:
    stages, replicas, shards = before
    keys = (f"pipeline.num_shards={shards}", "pipeline.sharding=megatron")
    found = refit(recipe(stages, replicas, *keys), world, NUM_LAYERS)
    section = found.pipeline
    assert (section.num_stages, section.num_replicas, section.all_shards) == after
    assert section.sharding == ("auto" if after[2] == 1 else "megatron")
    check_layout(found, world)
    (tmp_path / "recipe.toml").write_text(recipe_to_toml(found))
    assert read_recipe(tmp_path / "recipe.toml") == found


def test_another_number_of_shards_is_one_change(tmp_path: Path) -> None:
    pins = 'pipeline.sharding={"plan" = "zero3", "a.*" = "S(0)", "memory_limit_bytes" = 9}'
    old = recipe(1, 1, "pipeline.num_shards=[2, 1]", pins)
    (tmp_path / "recipe.toml").write_text(recipe_to_toml(old))
    assert read_recipe(tmp_path / "recipe.toml") == old
    found = read_recipe(tmp_path / "recipe.toml", ["pipeline.num_shards=1"]).pipeline
    assert (found.num_shards, found.sharding, found.divides) == (1, "auto", None)


@pytest.mark.parametrize(
    ("replicas", "shards", "sharding", "shares_optimizer", "found"),
    [
        (1, 1, "auto", True, None),
        (1, 1, "zero1", False, None),
        (2, 1, "auto", True, "auto+zero1"),
        (2, 1, "zero1", True, "zero1"),
        (1, 2, "auto", False, "auto"),
        (2, 2, "megatron", True, "megatron+zero1"),
        (1, 2, {"plan": "data", "a": "R"}, True, {"plan": "data+zero1", "a": "R"}),
    ],
)
def test_a_shared_optimizer_is_zero1_of_a_plan(
    replicas: int, shards: int, sharding: object, shares_optimizer: bool, found: object
) -> None:
    keys = {"num_shards": shards, "sharding": json.dumps(sharding).replace(":", " =")}
    keys |= {"shard_optimizer": str(shares_optimizer).lower()}
    section = recipe(1, replicas, *(f"pipeline.{key}={value}" for key, value in keys.items()))
    divides = section.pipeline.divides
    assert (divides and divides.given) == found


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (("sharding=megatron",), '"megatron" divides .*num_shards is 1; set that to 2 or more'),
        (("num_shards=0",), r"num_shards = 0 must be a whole number .*, such as \[2, 2\]"),
        (("num_shards=[2, true]",), r"num_shards = \[2, true\] must be a whole number"),
        (("num_shards=[]",), r"num_shards = \[\] must be a whole number"),
        (("sharding=3",), "sharding = 3 must be the name of a ready plan"),
        (("num_shards=2", 'sharding={"a" = "P"}'), "pipeline.sharding pins 'a' to 'P'; a weight"),
        (("num_shards=2", "sharding=alpa"), "pipeline.sharding='alpa': ready plans are 'auto'"),
        (
            ("num_shards=2", "schedule=pipedream_2bw", "sharding=zero2"),
            '_2bw": weights are gathered',
        ),
    ],
)
def test_shards_that_cannot_be_are_one_line(changes: tuple[str, ...], said: str) -> None:
    with pytest.raises(RecipeError, match=said) as raised:
        check_layout(recipe(1, 1, *(f"pipeline.{change}" for change in changes)), 2)
    assert "\n" not in str(raised.value)


ADAFACTOR = find_recipe("translation_T6_8192_16")


def adafactor(*changes: str) -> Recipe:
    return read_recipe(ADAFACTOR, [f"pipeline.{change}" for change in changes])


def test_whole_weights_are_asked_for_where_an_optimizer_needs_them() -> None:
    adafactor("num_shards=2", "sharding=data")
    for cut in ("num_shards=2", "sharding=zero1", "shard_optimizer=true"):
        with pytest.raises(RecipeError, match="whole weights, and a process has slices"):
            adafactor(cut)
    with pytest.raises(RecipeError, match=r'average_decay with pipeline.sharding = "zero1"'):
        recipe(1, 2, "pipeline.sharding=zero1", "train.average_decay=0.5")
