"""The arguments of a pipeline, resolved into a plan."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import ConfigError, PartitionError
from penstock.planner.arguments import Arguments, Model, Resources, resolve, resolve_num_stages
from penstock.planner.placement import Placement
from penstock.planner.plan import BalancedBy, Plan
from penstock.schedules import gpipe, interleaved_1f1b, one_f_one_b, zb_h1
from penstock.types import Recompute, TiedGradients, Transport
from tests.planner.plans import layers

MODEL = Model(layers(6), tuple((n, n + 1) for n in range(6)))
HERE = Resources(num_threads=4, num_cores=8, devices=())
GPUS = replace(HERE, devices=("cuda:0", "cuda:1"))
PLACES = Placement.of(range(3), num_replicas=2)
MESH = replace(HERE, placement=PLACES, transports=(Transport.TORCH_DISTRIBUTED,))


def plan(arguments: Arguments, resources: Resources = HERE) -> Plan:
    """Resolve `arguments` for a model of six layers."""
    return resolve(arguments, resolve_num_stages(arguments, resources), MODEL, resources)


def test_what_is_not_given_has_a_default() -> None:
    found = plan(Arguments(num_stages=2))
    assert (found.partition, found.balanced_by) == ((3, 3), BalancedBy.PARAMETERS)
    assert (found.schedule.name, found.num_microbatches, found.seed) == ("one_f_one_b", 8, 0)
    assert found.recompute == (Recompute.STAGE, Recompute.STAGE)
    assert plan(Arguments(num_stages=6, schedule=interleaved_1f1b(2))).num_microbatches == 12
    assert plan(Arguments(num_stages=2, schedule=gpipe(2, 5))).num_microbatches == 5
    assert plan(Arguments(partition=[1, 5])).balanced_by is BalancedBy.HAND


def test_by_default_the_stages_of_a_rank_share_a_gpu() -> None:
    found = plan(Arguments(num_stages=6, schedule=interleaved_1f1b(2)), GPUS)
    assert found.placement.devices == ("cuda:0", "cuda:1", "cuda:0") * 2


def test_torchs_threads_are_divided_among_the_ranks_of_a_process() -> None:
    assert plan(Arguments(num_stages=2)).threads_per_stage == 2
    assert plan(Arguments(), MESH).threads_per_stage == 4


def test_a_mesh_says_how_many_stages_and_replicas_there_are() -> None:
    found = plan(Arguments(schedule=interleaved_1f1b(2)), MESH)
    assert (found.num_stages, found.placement.num_replicas) == (6, 2)
    assert found.placement.stages_of(5) == (2, 5)


def test_without_a_mesh_the_stages_must_be_said() -> None:
    with pytest.raises(PartitionError, match="give num_stages=K"):
        plan(Arguments())
    with pytest.raises(PartitionError, match="give one of the two"):
        plan(Arguments(num_stages=3, partition=[3, 3]))


def test_words_stand_for_values() -> None:
    words: dict[str, Any] = {"recompute": ["LAYERS", "never"], "transport": "Loopback"}
    found = plan(Arguments(num_stages=2, schedule="ZB-H1", tied_gradients="summed", **words))
    assert found.schedule == zb_h1() and found.transport is Transport.LOOPBACK
    assert found.recompute == (Recompute.LAYERS, Recompute.NEVER)
    assert found.tied_gradients is TiedGradients.SUMMED
    assert replace(found, schedule="1f1b").schedule is one_f_one_b  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"recompute": "all"}, 'recompute=\'all\'; give one of "stage", "never", "layers", or R'),
        ({"recompute": ["stage", 1]}, "recompute=1; give one of"),
        ({"transport": 1}, 'transport=1; give one of "threads", "loopback", "torch.distributed"'),
        ({"tied_gradients": ""}, "tied_gradients=''; give one of"),
        ({"schedule": "1f2b"}, r"no schedule '1f2b'; .* \(also 1f1b for one_f_one_b, inter"),
    ],
)
def test_other_words_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(Arguments(num_stages=2, **wrong))


def test_a_plan_leaves_nothing_to_other_arguments() -> None:
    Arguments().check_none_beside_plan()
    given = Arguments(num_stages=2, seed=0, batch_norm_over_replicas=False)
    with pytest.raises(
        ConfigError, match="decides num_stages=, seed=, batch_norm_over_replicas= already"
    ):
        given.check_none_beside_plan()
