"""The arguments of a pipeline, resolved into a plan."""

from dataclasses import replace

import pytest

from penstock.errors import ConfigError, PartitionError
from penstock.planner.arguments import Arguments, Model, Resources, resolve, resolve_num_stages
from penstock.planner.placement import Placement
from penstock.planner.plan import BalancedBy, Plan
from penstock.schedules import interleaved_1f1b
from penstock.types import Recompute, Transport
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
    assert (found.schedule.name, found.num_microbatches, found.seed) == ("gpipe", 1, 0)
    assert found.recompute == (Recompute.STAGE, Recompute.STAGE)
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


@pytest.mark.parametrize("wrong", [{"recompute": "never"}, {"transport": 1}])
def test_words_for_choices_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="must be one of"):
        plan(Arguments(num_stages=2, **wrong))  # type: ignore[arg-type]


def test_a_plan_leaves_nothing_to_other_arguments() -> None:
    Arguments().check_none_beside_plan()
    given = Arguments(num_stages=2, seed=0, batch_norm_over_replicas=False)
    with pytest.raises(
        ConfigError, match="decides num_stages=, seed=, batch_norm_over_replicas= already"
    ):
        given.check_none_beside_plan()
