"""Processes instead of threads change no bit; replicas change rounding only."""

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

import penstock
from penstock.errors import ConfigError
from penstock.planner.placement import Placement
from penstock.runtime.pipeline_module import parts_of
from penstock.schedules import ALL_SCHEDULES, gpipe
from penstock.sharding.named import READY
from penstock.types import Recompute, Reduction
from tests.distributed.call import call
from tests.every_schedule import Dealt, families
from tests.laws.test_accumulation import MOVED_BY_EVALUATION
from tests.model_parts import Does
from tests.models import ALL_MODELS, LOW_PRECISION, Built, Model, vectors
from tests.reference import Unsplit, mean, split, total
from tests.side_by_side import pipeline, same_bits, state_of


class Widen(nn.Module):
    """Give each sample 40,000 rows: (n, 8) -> (n, 40000, 8), more than a megabyte each."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(1) * torch.linspace(0.1, 1.0, 40_000).unsqueeze(1)


def large_messages() -> list[Any]:
    """Make layers between which a micro-batch is larger than what waits in the kernel."""
    first, last = (nn.Linear(6, 8), Widen()), (Does(lambda x: x.mean(1)), nn.Linear(8, 3))
    return [*first, nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), *last]


class Shaken(nn.Module):
    """Draw from Python's and NumPy's global generators, or one of them; and from torch's."""

    def __init__(self, *, python: bool = True, arrays: bool = True, drop: float = 0.0) -> None:
        super().__init__()
        self.python, self.arrays, self.drop = python, arrays, drop

    def forward(self, x: Tensor) -> Tensor:
        if self.python:
            x = x * random.uniform(0.5, 1.5) + random.gauss()
        if self.arrays:
            x = x[numpy.random.permutation(len(x))] * float(numpy.random.randn())
        return nn.functional.dropout(x, self.drop)


def randomness_outside() -> list[Any]:
    """Make layers that draw random numbers that are not torch's."""
    first, second = Shaken(arrays=False), Shaken(python=False)
    last = nn.Sequential(nn.Linear(6, 6), Shaken(), nn.Dropout(0.2))
    return [nn.Linear(6, 6), first, second, Shaken(drop=0.3), last, nn.Linear(6, 3)]


LARGE = Model("large_messages", large_messages, vectors, nn.functional.mse_loss)
OUTSIDE = Model(
    "randomness_outside", randomness_outside, vectors, nn.functional.mse_loss, quiet_in_eval=False
)
BY_NAME = {model.name: model for model in (*ALL_MODELS, LARGE, OUTSIDE, LOW_PRECISION)}


@dataclass(frozen=True, slots=True)
class Case:  # one training run; the seven samples and the micro-batches are of one replica
    model: Model
    schedule: Any
    recompute: Any = Recompute.NEVER
    num_replicas: int = 1
    num_microbatches: int = 3
    reduction: Reduction = Reduction.MEAN
    autocast: torch.dtype | None = None
    offload: bool = False
    sharding: str | None = None
    """How stages are divided, where several processes share each."""
    dtype: torch.dtype = torch.float64
    """Of divided stages."""
    num_samples: int = 7

    def batches(self) -> list[Any]:
        count = self.num_samples * self.num_replicas
        return [self.exact(b) for b in self.model.batches(count, 3)]

    def built(self, *, unsplit: bool = False) -> Built:
        built = self.model.build_unsplit() if unsplit else self.model.build()
        if self.sharding is not None:
            nn.ModuleList(built.modules).to(self.dtype)
        return built

    def exact(self, batch: Any) -> Any:
        """Return a mini-batch in the precision of the model."""
        if self.sharding is None:
            return batch
        return tree_map_only(
            Tensor, lambda t: t.to(self.dtype) if t.is_floating_point() else t, batch
        )

    def precision(self) -> torch.autocast:
        """Return what to train under."""
        return torch.autocast("cpu", self.autocast, enabled=self.autocast is not None)


def batches_of(case: Case, replica: int) -> list[Any]:
    """Give a replica's share of the mini-batches: its micro-batches of those of all replicas."""
    if case.num_replicas == 1:
        return case.batches()
    mine = slice(case.num_microbatches * replica, case.num_microbatches * (replica + 1))
    pieces = case.num_microbatches * case.num_replicas
    return [
        tuple(torch.cat(split(side, pieces)[0][mine]) for side in batch)
        for batch in case.batches()
    ]


def train(mesh: penstock.Mesh, case: Case) -> dict[str, Any]:
    model, built, shares = case.model, case.built(), batches_of(case, mesh.replica)
    if mesh.replica + mesh.shard > 0:  # the pipeline must start all replicas and shards equal
        for parameter in nn.ModuleList(built.modules).parameters():
            parameter.data += 1.0
    pipe = pipeline(
        model,
        built,
        num_stages=len(case.schedule.ranks) if isinstance(case.schedule, Dealt) else None,
        mesh=mesh,
        num_microbatches=case.num_microbatches,
        schedule=case.schedule,
        recompute=case.recompute,
        offload=case.offload,
        reduction=case.reduction,
        batch_norm_over_replicas=case.num_replicas > 1,
        sharding=case.sharding,
        example_inputs=None if case.sharding is None else shares[0][0],
    )
    losses = []
    scaler = penstock.GradScaler(pipe, init_scale=2.0**16, enabled=case.autocast is None)
    for batch in shares:
        losses.append(pipe.train_step(*batch, loss_scale=scaler.get_scale()))
        if model.quiet_in_eval and model.name not in MOVED_BY_EVALUATION:
            pipe.eval_step(shares[0][0])
    scaler.unscale_(torch.optim.SGD([{"params": list(pipe.parameters())}]))
    found = {"losses": losses, "norm": penstock.clip_grad_norm_(pipe, 0.5)}
    found |= whole_state(pipe, built.modules)
    if pipe.sharding is not None:
        found["divided"] = sum(layer.is_divided for layer in pipe.sharding.layers)
    return found | ({"outputs": pipe.eval_step(shares[0][0])} if model.quiet_in_eval else {})


def whole_state(pipe: penstock.Pipeline, modules: list[nn.Module]) -> dict[str, Tensor | None]:
    """List every gradient, parameter and buffer of this process; what shards share, whole."""
    own = dict(pipe.named_parameters())
    gradients = {name: p.grad for name, p in own.items() if p.grad is not None}
    shards = parts_of(pipe).shards
    of = {id(own[name]): whole for name, whole in shards.whole(own).items()}
    of |= {id(gradients[name]): whole for name, whole in shards.whole(gradients).items()}
    return {name: of.get(id(tensor), tensor) for name, tensor in state_of(modules)}


def unsplit(case: Case) -> dict[str, Any]:
    """Train the same with plain torch, all replicas' micro-batches one after the other."""
    model, whole, built = case.model, case.batches(), case.built(unsplit=True)
    weigh = {Reduction.MEAN: mean, Reduction.SUM: total}[case.reduction]
    num_microbatches = case.num_microbatches * case.num_replicas
    reference = Unsplit(built.modules, built.forward, num_microbatches, weigh)
    losses = [reference.train_step(x, y, model.loss) for x, y in whole]
    parameters = dict.fromkeys(p for m in built.modules for p in m.parameters())
    norm = nn.utils.clip_grad_norm_(parameters, 0.5)
    found = {"losses": losses, "norm": norm, **dict(state_of(built.modules))}
    return found | ({"outputs": reference.evaluate(whole[0][0])} if model.quiet_in_eval else {})


def models(*names: str) -> list[Model]:
    return [BY_NAME[name] for name in names]


FEW = models(
    *("transformer", "structures", "fan_out", "batch_norms", "changing_buffers", "channels_last"),
    *("odd_addresses", "randomness", "frozen_middle", "large_messages"),
    *("randomness_outside", "bfloat16"),
)
DEALT = models("transformer", "structures", "fan_out", "batch_norms", "large_messages")
MOVED = models("transformer", "batch_norms", "fan_out")
CAST = models("mlp", "convolutions", "transformer", "fan_out", "changing_buffers")
REPLICATED = models(
    *("transformer", "batch_norms", "randomness", "randomness_outside", "frozen_middle"),
    "bfloat16",
)
REPLICAS = ("one_in_each_process", "two_in_each_process")
SHARDED = models("transformer", "batch_norms", "fan_out", "frozen_middle", "changing_buffers")
PLANS = [*(name for name in READY if name != "auto"), "zero1", "megatron+zero1"]
FEW_PLANS = ("grid", "expert", "zero2")
"""Plans that no other quick test of processes has."""


def in_turns(chosen: list[Model], num_stages: int, turns: Iterable[int] = range(3)) -> list[Case]:
    """Return cases of each model with a schedule for each turn; all factors take turns."""
    return [
        Case(
            model,
            ALL_SCHEDULES[(3 * number + turn) % len(ALL_SCHEDULES)],
            list(Recompute)[(number + num_stages + turn) % len(Recompute)],
            reduction=list(Reduction)[(number + turn) % 2],
        )
        for (number, model), turn in product(enumerate(chosen), turns)
    ]


def several(chosen: list[Model], num_ranks: int, per_rank: int) -> list[Case]:
    """Return cases of several stages in each process; schedules take turns."""
    fitting = families(per_rank)
    large = [model for model in chosen if len(model.layers()) >= num_ranks * per_rank]
    return [
        Case(model, fitting[n % len(fitting)], recompute)
        for n, (model, recompute) in enumerate(product(large, Recompute))
    ]


def in_shards(per_rank: int, num_replicas: int = 1) -> list[Case]:
    """Return cases of each schedule with so many stages on a rank; models and plans take turns."""
    alike = [m for m in SHARDED if num_replicas == 1 or m.name != "changing_buffers"]
    return [
        Case(
            alike[n % len(alike)],
            schedule,
            list(Recompute)[n % len(Recompute)],
            num_replicas,
            sharding=PLANS[n % len(PLANS)],
        )
        for n, schedule in enumerate(families(per_rank))
    ]


def on_unlike_meshes(cases: list[Case]) -> list[Case]:
    """Return cases with micro-batches of 12 and 11 samples: what crosses between stages of unlike
    meshes can be in even slices, and cannot.
    """
    return [replace(case, num_samples=34) for case in cases]


def dealt(*ranks: int) -> list[Case]:
    """Return cases of stages on these ranks."""
    return [Case(m, Dealt(ranks), r) for m, r in product(DEALT, Recompute)]


CASES: dict[str, Callable[[int], list[Case]]] = {
    "a_turn": lambda k: in_turns(FEW, k, [k % 3]),
    "all_turns": lambda k: in_turns(FEW, k),
    "autocast": lambda k: [
        replace(case, autocast=kind)
        for kind, case in product((torch.bfloat16, torch.float16), in_turns(CAST, k))
    ],
    "2_in_each_process": lambda k: several(FEW, k, 2),
    "3_in_each_process": lambda k: several(FEW, k, 3),
    "apart": lambda _: dealt(0, 1, 0, 1, 0),
    "neighbours": lambda _: dealt(0, 1, 1, 0),
    "offloaded": lambda _: [
        Case(model, gpipe, recompute, num_microbatches=4, offload=True)
        for model in MOVED
        for recompute in (*Recompute, Recompute.layers(*range(1, len(model.layers()), 2)))
    ],
    "few_plans": lambda _: [
        Case(SHARDED[n % len(SHARDED)], gpipe, Recompute.STAGE, sharding=plan)
        for n, plan in enumerate(FEW_PLANS)
    ],
    "every_plan": lambda _: [
        Case(model, gpipe, Recompute.STAGE, sharding=plan)
        for model, plan in product(SHARDED, PLANS)
    ],
    "shards": lambda _: in_shards(1) + in_shards(2),
    "unlike": lambda _: on_unlike_meshes(in_shards(1) + in_shards(2)),
    "float32": lambda _: [
        replace(case, dtype=torch.float32) for case in on_unlike_meshes(in_shards(1))
    ],
    "replicas_of_shards": lambda _: in_shards(1, 2) + in_shards(2, 2),
    "replicas_of_unlike": lambda _: on_unlike_meshes(in_shards(1, 2) + in_shards(2, 2)),
    REPLICAS[0]: lambda k: [
        replace(c, num_replicas=2) for c in in_turns(REPLICATED, k, range(1 if k == 1 else 3))
    ],
    REPLICAS[1]: lambda k: [replace(c, num_replicas=2) for c in several(REPLICATED, k, 2)],
}
"""What is trained, by name, for so many processes in each replica."""


def work(mesh: penstock.Mesh, which: str) -> list[dict[str, Any]]:
    found = []
    for case in CASES[which](mesh.num_stages):
        with case.precision():
            found.append(train(mesh, case))
    return found


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("which", "num_ranks"),
    (
        ("a_turn", 2),
        *(slow("a_turn", k) for k in (1, 3)),
        *(slow("all_turns", k) for k in (2, 3)),
        slow("autocast", 2),
        *(slow(f"{n}_in_each_process", k) for n, k in ((2, 2), (3, 1), (2, 3))),
        *(slow(which, 2) for which in ("apart", "neighbours", "offloaded")),
    ),
)
def test_processes_give_the_unsplit_models_bits(which: Any, num_ranks: Any, tmp_path: Any) -> None:
    """Also where the first stage and the last one are of the same process, or neighbours are."""
    results = call(work, (num_ranks, 1), tmp_path, which=which)
    for case, *by_rank in zip(CASES[which](num_ranks), *results, strict=True):
        with case.precision():
            expected = unsplit(case)
        assert set().union(*by_rank) == expected.keys()
        for found in by_rank:
            assert not unlike(found, expected, found), f"{case}"


def unlike(ours: dict[str, Any], theirs: dict[str, Any], names: Iterable[str]) -> list[str]:
    pairs = {name: (tree_leaves(ours[name]), tree_leaves(theirs[name])) for name in names}
    return [
        name for name, (a, b) in pairs.items() if len(a) != len(b) or not all(map(same_bits, a, b))
    ]


OWN = "buffer 5."  # of an InstanceNorm: each replica's are of its own samples, as outputs are


def of_one_stage(mesh: penstock.Mesh) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return what both tests of two processes compare: to start these takes longest."""
    return work(mesh, REPLICAS[0]), train_odd(mesh)


@pytest.fixture(scope="module")
def of_two_replicas(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return call(of_one_stage, (1, 2), tmp_path_factory.mktemp("replicas"))


def test_two_replicas_of_1_stage_give_one_pipelines_gradients_but_for_rounding(
    of_two_replicas: list[Any],
) -> None:
    check_replicas(REPLICAS[0], 1, [trained for trained, _ in of_two_replicas])


@pytest.mark.slow
@pytest.mark.parametrize("which", REPLICAS)
def test_two_replicas_of_several_stages_do_so_too(which: str, tmp_path: Path) -> None:
    check_replicas(which, 2, call(work, (2, 2), tmp_path, which=which))


def check_replicas(which: str, num_stages: int, results: list[list[dict[str, Any]]]) -> None:
    """Check each rank's results against the unsplit model, and against the other replica's."""
    for case, *by_rank in zip(CASES[which](num_stages), *results, strict=True):
        expected = unsplit(case)
        for rank, found in enumerate(by_rank):
            names = [n for n in found if n != "outputs" and not n.startswith(OWN)]
            assert_close(found, expected, names, str(case))
            twin = by_rank[(rank + num_stages) % len(by_rank)]
            assert not unlike(found, twin, names), f"{case}: the replicas"


def of_meshes(
    *meshes: tuple[tuple[int, ...], ...],
    shapes: Any = None,
    in_turn: bool = False,
    idle: tuple[int, ...] = (),
) -> Placement:
    """Place stages on meshes of their own, [replica][shard]; `in_turn` whatever their ranks."""
    places = tuple(range(len(meshes))) if in_turn else None
    devices = ("cpu",) * len(meshes)
    return Placement(meshes, devices, shard_shapes=shapes, stage_places=places, idle=idle)


@pytest.mark.parametrize(
    ("which", "placement"),
    (
        ("few_plans", Placement.of(range(1), num_shards=2)),
        slow("every_plan", Placement.of(range(1), num_shards=2)),
        slow("shards", Placement.of(range(2), num_shards=2)),
        slow("unlike", of_meshes(((0,),), ((1, 2),))),
        slow("unlike", of_meshes(((0, 1),), ((2,),))),
        slow("unlike", of_meshes(((2,),), ((0, 1),), in_turn=True)),
        slow("unlike", of_meshes(((1, 2),), ((0,),), in_turn=True)),
        slow("few_plans", of_meshes(((1, 2),), idle=(0,))),
        slow("unlike", of_meshes(((3,),), ((1, 2),), in_turn=True, idle=(0,))),
        slow("shards", of_meshes(((2, 3),), ((0, 1),), in_turn=True)),
        slow("float32", of_meshes(((0,),), ((1, 2),))),
        slow("float32", of_meshes(((0, 1),), ((2,),))),
        slow("unlike", of_meshes(((0, 1, 2),), ((3, 4),))),
        slow("unlike", of_meshes(((0, 1, 2, 3),), ((4,),), shapes=((2, 2), (1,)))),
        slow("every_plan", Placement.of(range(1), num_shards=3)),
        slow("replicas_of_shards", Placement.of(range(2), 2, num_shards=2)),
        slow("replicas_of_unlike", of_meshes(((0,), (3,)), ((1, 2), (4, 5)))),
    ),
    ids=(
        *("1 x 2, in turns", "1 x 2", "2 x 2", "1 + 2", "2 + 1"),
        *("1 + 2, the last rank first", "2 + 1, the last ranks first"),
        *("1 x 2, and an idle rank", "1 + 2, and an idle rank", "2 x 2, the last ranks first"),
        *("1 + 2 in float32", "2 + 1 in float32", "3 + 2", "2 x 2 + 1", "1 x 3"),
        *("2 replicas of 2 x 2", "2 replicas of 1 + 2"),
    ),
)
def test_shards_give_the_unsplit_models_gradients_but_for_rounding(
    which: str, placement: Placement, tmp_path: Path
) -> None:
    """With every schedule: stages of several processes, of unlike meshes too, and replicas."""
    results = call(work, placement, tmp_path, timeout_s=200.0, which=which)
    is_ready = which in ("few_plans", "every_plan")
    whole = ("grid",) if is_ready else ("grid", "data")  # may be, in small stages
    for case, *by_rank in zip(CASES[which](placement.num_stages), *results, strict=True):
        expected = unsplit(case)
        assert set().union(*by_rank) - {"divided"} == expected.keys()
        may_be_whole = case.model.name != "transformer" or case.sharding in whole
        assert may_be_whole or by_rank[-1]["divided"] > 0, f"{case}"
        for found in by_rank:
            names = [n for n in expected if n in found]
            if placement.num_replicas > 1:
                names = [n for n in names if n != "outputs" and not n.startswith(OWN)]
            if case.dtype is torch.float32:
                assert_close_in_float32(found, expected, names, str(case))
            else:
                assert_close(found, expected, names, str(case), within=1e-12)


def assert_close(
    found: dict[str, Any],
    expected: dict[str, Any],
    names: Iterable[str],
    case: str,
    within: float | None = None,
) -> None:
    rtol, atol = (1e-5, 1e-6) if within is None else (within, within)
    for name in names:
        for a, b in zip(tree_leaves(found[name]), tree_leaves(expected[name]), strict=True):
            assert (a is None) == (b is None), f"{case}: {name}"
            assert a is None or torch.allclose(a, b, rtol=rtol, atol=atol), f"{case}: {name}"


def assert_close_in_float32(
    found: dict[str, Any], expected: dict[str, Any], names: list[str], case: str
) -> None:
    """Compare to 1e-6 of the largest entry of each tensor; one that has less than 1e-6 of the
    largest gradient (of a bias before BatchNorm, which is zero but for rounding), to that.
    """

    def leaves(value: Any) -> list[Tensor]:
        return [t.detach().double() for t in tree_leaves(value) if t is not None]

    wanted = {name: leaves(expected[name]) for name in names}
    size = {n: max(float(t.abs().max()) for t in own) for n, own in wanted.items() if own}
    largest = max(own for name, own in size.items() if name.startswith("gradient"))
    for name, own in wanted.items():
        for a, b in zip(leaves(found[name]), own, strict=True):
            within = 1e-6 * (largest if size[name] < 1e-6 * largest else float(b.abs().max()))
            assert float((a - b).abs().max()) <= within, f"{case}: {name}"


def test_replicas_start_equal_in_every_type_of_number(of_two_replicas: list[Any]) -> None:
    first, second = (odd for _, odd in of_two_replicas)
    assert first.pop("error") == second.pop("error")
    assert first.keys() == second.keys() == {*TYPES, "frozen", "weight"}
    assert all(
        same_bits(tensor.to(torch.complex64), second[name].to(torch.complex64))
        for name, tensor in first.items()
    )


TYPES = ("int16", "uint16", "float8_e4m3fn", "float8_e5m2", "bool", "complex64")


class Odd(nn.Module):
    """Scales by a weight; everything else differs between the replicas until they start equal."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        values = torch.arange(start, start + 3)
        for name in TYPES:
            self.register_buffer(name, values.float().to(getattr(torch, name)))
        self.frozen = nn.Parameter(values.float().to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.frozen.float()


def train_odd(mesh: penstock.Mesh) -> dict[str, Any]:
    """Train a step; give the state then, and the error about what cannot be trained."""
    options: dict[str, Any] = {"mesh": mesh, "num_microbatches": 2, "loss": nn.MSELoss()}
    pipe = penstock.Pipeline([Odd(5 * mesh.replica)], **options)
    pipe.train_step(torch.ones(4, 3), torch.zeros(4, 3))
    state = {name.removeprefix("0."): tensor for name, tensor in pipe.state_dict().items()}
    trained = Odd(0)
    trained.frozen = nn.Parameter(trained.frozen.detach())
    try:
        penstock.Pipeline([trained], **options)
    except ConfigError as error:
        return {**state, "error": str(error)}
    return state
