"""The law of asynchronous schedules: the bits of training with the delays that their papers state,
micro-batch after micro-batch.
"""

import copy
from collections.abc import Callable
from itertools import accumulate, pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import penstock
from penstock.errors import BatchError, ConfigError, StateError
from penstock.planner.placement import Placement
from penstock.schedules import Family, gpipe, one_f_one_b, pipedream, pipedream_2bw
from penstock.trace import MemoryKind
from tests import delayed
from tests.distributed import test_equality_processes as equality
from tests.distributed.call import call
from tests.models import BY_NAME, LOW_PRECISION, Model
from tests.reference import Unsplit
from tests.side_by_side import autocast, differences, pipeline, same_bits, state_of
from tests.ways import IN_ONE_PROCESS, WAYS, one_each

FAMILIES = (pipedream_2bw, pipedream(), pipedream(vertical_sync=True))
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw, for each": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "adam, fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "main weights": lambda p: penstock.MainWeights(torch.optim.AdamW, p, lr=0.01),
}


def version_of(family: Family, num_stages: int, num_microbatches: int) -> delayed.Version:
    """Give the delays that the family's paper states."""
    if family is pipedream_2bw:
        return delayed.two_versions(num_microbatches)
    return (delayed.synchronised if dict(family.arguments)["vertical_sync"] else delayed.stashed)(
        num_stages
    )


def assert_keeps_the_law(  # noqa: PLR0913 - what a window may vary in
    model: Model,
    family: Family,
    optimizer: str = "sgd",
    *,
    partition: tuple[int, ...],
    num_microbatches: int,
    windows: tuple[int, ...],
    rates: Callable[[torch.optim.Optimizer], Any] | None = None,
    bf16: bool = False,
    mesh: penstock.Mesh | None = None,
    **options: Any,
) -> None:
    """Train in windows of so many mini-batches; all bits must agree at the end of each."""
    built, twin = model.build(), model.build_unsplit()
    unsplit = Unsplit(twin.modules, twin.forward, num_microbatches)
    ends = list(accumulate(partition, initial=0))
    stages = [twin.modules[a:b] for a, b in pairwise(ends)]
    version = version_of(family, len(partition), num_microbatches)
    theirs = OPTIMIZERS[optimizer]([p for m in twin.modules for p in m.parameters()])
    their_rates = rates(theirs) if rates else None
    per_microbatch = family is not pipedream_2bw
    reference = delayed.Delayed(unsplit, model.loss, theirs, stages, version, per_microbatch)
    batches = iter(model.batches(model.min_samples * num_microbatches + 1, sum(windows)))
    told: dict[str, Any] = {"num_microbatches": num_microbatches, "schedule": family, "mesh": mesh}
    with pipeline(model, built, partition=partition, **options, **told) as pipe:
        ours = OPTIMIZERS[optimizer](list(pipe.parameters()))
        our_rates = rates(ours) if rates else None
        for length in windows:
            window = [next(batches) for _ in range(length)]
            with autocast(bf16):
                losses = pipe.train_steps(window, ours, lr_scheduler=our_rates)
                wanted = reference.train(window, their_rates.step if their_rates else None)
            assert same_bits(losses, wanted), f"losses {losses}, and {wanted}"
            found = differences(built.modules, twin.modules, is_part=mesh is not None)
            assert not found, "; ".join(found)
            earlier = [] if mesh is None else twin.modules[: ends[mesh.stage]]
            first = len([*nn.ModuleList(earlier).parameters()])
            assert_same_state(ours, theirs, None if mesh is None else first)


def assert_same_state(
    ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, first: int | None = None
) -> None:
    """Compare optimizers; `ours` may have some of the parameters alone, from the `first` on."""
    mine, wanted = ours.state_dict(), theirs.state_dict()
    if first is None:
        assert mine["param_groups"] == wanted["param_groups"]
        assert mine["state"].keys() == wanted["state"].keys()
    for place, state in mine["state"].items():
        for name, found in state.items():
            value = wanted["state"][place + (first or 0)][name]
            same = same_bits(found, value) if isinstance(value, torch.Tensor) else found == value
            assert same, f"{name} of parameter {place}"


@pytest.mark.parametrize("optimizer, family", one_each(OPTIMIZERS, FAMILIES))
def test_windows_equal_training_with_delays(family: Family, optimizer: str) -> None:
    options: dict[str, Any] = {"partition": (2, 3, 4), "num_microbatches": 3, "windows": (4, 1, 3)}
    assert_keeps_the_law(BY_NAME["convolutions"], family, optimizer, **options)


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_windows_equal_training_with_delays_of_main_weights(family: Family) -> None:
    options: dict[str, Any] = {"partition": (2, 2, 2), "num_microbatches": 3, "windows": (4, 1)}
    assert_keeps_the_law(LOW_PRECISION, family, "main weights", **options)


@pytest.mark.parametrize("turn", range(len(WAYS)))
@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_windows_equal_training_with_delays_in_every_way(family: Family, turn: int) -> None:
    """Two models take turns."""
    way: Any = WAYS[turn].values[0]
    options = {name: value for name, value in way.items() if name != "schedule"}
    models = (("transformer", (1, 1, 1, 2)), ("convolutions", (3, 6)))
    name, partition = models[(turn + turn // 2 + FAMILIES.index(family)) % 2]
    told: dict[str, Any] = {"partition": partition, "num_microbatches": 2, "windows": (4, 2)}
    assert_keeps_the_law(BY_NAME[name], family, "adamw", **options, **told)


@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_a_scheduler_gives_each_update_the_options_of_its_batch(family: Family) -> None:
    assert_keeps_the_law(
        BY_NAME["mlp"],
        family,
        partition=(2, 2, 1),
        num_microbatches=2,
        windows=(4, 2),
        rates=lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=9
        ),
    )


def draw_case(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(("convolutions", "transformer", "mlp", "lstm", "unet")))
    model, num_stages = BY_NAME[name], data.draw(st.integers(1, 4))
    rest = len(model.layers()) - num_stages
    extra = [data.draw(st.integers(0, rest // num_stages)) for _ in range(num_stages - 1)]
    partition = (*(1 + more for more in extra), 1 + rest - sum(extra))
    assert_keeps_the_law(
        model,
        data.draw(st.sampled_from(FAMILIES)),
        data.draw(st.sampled_from(list(OPTIMIZERS))),
        partition=partition,
        num_microbatches=data.draw(st.integers(1, 4)),
        windows=(data.draw(st.integers(1, 6)), data.draw(st.integers(1, 3))),
        bf16=data.draw(st.booleans()) and name not in ("lstm", "unet"),
        recompute=data.draw(st.sampled_from((*penstock.Recompute, penstock.Recompute.layers(0)))),
        offload=data.draw(st.booleans()),
        transport=data.draw(st.sampled_from(IN_ONE_PROCESS)),
    )


@settings(max_examples=8)
@given(st.data())
def test_windows_of_any_size_equal_training_with_delays(data: st.DataObject) -> None:
    draw_case(data)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.data())
def test_many_windows_equal_training_with_delays(data: st.DataObject) -> None:
    draw_case(data)


class Tied(nn.Module):  # uses the first layer's weight again at the end
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(4, 8, bias=False), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.middle(self.first(x).tanh()).tanh()
        found: torch.Tensor = nn.functional.linear(hidden, self.first.weight)
        return found


class TiedModules(Tied):  # the same by a module of its own, which has the weight too
    def __init__(self) -> None:
        super().__init__()
        self.last, self.last.weight = nn.Linear(4, 8, bias=False), self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(self.middle(self.first(x).tanh()).tanh())
        return found


@pytest.mark.parametrize(("kind", "partition"), [(Tied, [1, 1]), (TiedModules, [1, 2])])
@pytest.mark.parametrize("tied", penstock.TiedGradients)
@pytest.mark.parametrize("family", FAMILIES, ids=repr)
def test_a_tied_weight_lags_everywhere_as_on_its_home_stage(family, tied, kind, partition) -> None:
    check_tied(family, tied, kind, partition)


def check_tied(
    family: Family,
    tied: Any,
    kind: type[Tied],
    partition: list[int],
    mesh: penstock.Mesh | None = None,
    sharding: str | None = None,
) -> None:
    """Compare bits, or with shards what differs by more than rounding."""
    torch.manual_seed(0)
    model = kind().double()
    twin, g = copy.deepcopy(model), torch.Generator().manual_seed(1)
    drawn = [torch.randn(6, 12, dtype=torch.float64, generator=g) for _ in range(6)]
    batches = [(both[:, :4], both[:, 4:]) for both in drawn]
    captured = penstock.capture(model, batches[0][0])
    options = {"partition": partition, "tied_gradients": tied, "mesh": mesh}
    options |= {"sharding": sharding, "example_inputs": batches[0][0]} if sharding else {}
    with pipe_of(family, layers=captured, **options) as pipe:
        ours = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9)
        found = pipe.train_steps(batches, ours)
        state = equality.whole_state(pipe, [model])
    theirs = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    unsplit = Unsplit([twin], lambda call, x: call(0, x), 2)
    stages, version = [[twin.first], [twin.middle]], version_of(family, 2, 2)
    reference = delayed.Delayed(
        unsplit, nn.functional.mse_loss, theirs, stages, version, family is not pipedream_2bw
    )
    wanted = reference.train(batches, None)
    if sharding is not None:
        expected = {"losses": wanted, **dict(state_of([twin]))}
        equality.assert_close({"losses": found, **state}, expected, ["losses", *state], "", 1e-12)
        return
    assert same_bits(found, wanted)
    assert not differences([model], [twin], is_part=mesh is not None)


def keep_the_law(mesh: penstock.Mesh) -> None:
    for family in FAMILIES:
        for name, partition in (("transformer", (2, 3)), ("convolutions", (3, 6))):
            told: dict[str, Any] = {"partition": partition, "num_microbatches": 2, "mesh": mesh}
            assert_keeps_the_law(BY_NAME[name], family, "adamw", windows=(3, 2), **told)
        for tied in penstock.TiedGradients:
            check_tied(family, tied, TiedModules, [1, 2], mesh)


@pytest.mark.slow
def test_processes_keep_the_law(tmp_path: Path) -> None:
    call(keep_the_law, (2, 1), tmp_path)


WINDOWS = (3, 2, 2)
"""Mini-batches of each call; those of the last one go on from a checkpoint."""


def cases_in_shards(which: str) -> list[equality.Case]:
    """Return a few cases, or of each family with each model; plans and recompute take turns."""
    if which == "few":
        few = product(equality.SHARDED[:2], ("data", "zero3"))
        return [equality.Case(model, pipedream_2bw, sharding=plan) for model, plan in few]
    plans = [plan for plan in equality.PLANS if plan != "zero2" and "zero1" not in plan]
    policies = list(penstock.Recompute)
    return [
        equality.Case(model, family, policies[n % len(policies)], sharding=plans[n % len(plans)])
        for n, (family, model) in enumerate(product(FAMILIES, equality.SHARDED))
    ]


def parted(case: equality.Case, num_stages: int) -> tuple[int, ...]:
    """Cut a model into stages of about as many layers."""
    return tuple(map(len, torch.arange(len(case.model.layers())).tensor_split(num_stages)))


def windows_of(case: equality.Case) -> list[list[Any]]:
    batches = [case.exact(batch) for batch in case.model.batches(7, sum(WINDOWS))]
    ends = accumulate(WINDOWS, initial=0)
    return [batches[a:b] for a, b in pairwise(ends)]


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def train_in_shards(mesh: penstock.Mesh, which: str, where: str) -> list[dict[str, Any]]:
    """Train in windows, the last one in a new pipeline, on what the first has saved."""
    if mesh.num_stages == 2:
        for tied, sharding in product(penstock.TiedGradients, ("data", "megatron")):
            check_tied(pipedream_2bw, tied, TiedModules, [1, 2], mesh, sharding)
    found = []
    for number, case in enumerate(cases_in_shards(which)):
        folder, windows = Path(where) / str(number), windows_of(case)
        modules, pipe = in_shards(mesh, case, is_first=mesh.shard == 0)
        ours = momentum(pipe.parameters())
        losses = [pipe.train_steps(window, ours) for window in windows[:-1]]
        penstock.save_checkpoint(folder, pipe, ours)
        modules, pipe = in_shards(mesh, case, is_first=False)
        ours = momentum(pipe.parameters())
        penstock.load_checkpoint(folder, pipe, ours)
        losses.append(pipe.train_steps(windows[-1], ours))
        divided = sum(layer.is_divided for layer in pipe.sharding.layers)
        state = equality.whole_state(pipe, modules)
        found.append({"losses": losses, "divided": divided, **state})
    return found


def in_shards(
    mesh: penstock.Mesh, case: equality.Case, *, is_first: bool
) -> tuple[list[nn.Module], Any]:
    """Make a case's model and its pipeline; all but the first have other weights, in place of
    which the right ones must come.
    """
    built = case.built()
    if not is_first:
        for parameter in nn.ModuleList(built.modules).parameters():
            parameter.data += 1.0
    options: dict[str, Any] = {"partition": parted(case, mesh.num_stages), "mesh": mesh}
    options |= {"num_microbatches": case.num_microbatches, "schedule": case.schedule}
    options |= {"recompute": case.recompute, "sharding": case.sharding}
    options |= {"example_inputs": windows_of(case)[0][0][0]}
    pipe = pipeline(case.model, built, **options)
    return built.modules, pipe


def train_with_delays(case: equality.Case, num_stages: int) -> dict[str, Any]:
    built, partition = case.built(), parted(case, num_stages)
    ends = list(accumulate(partition, initial=0))
    reference = delayed.Delayed(
        Unsplit(built.modules, built.forward, case.num_microbatches),
        case.model.loss,
        momentum(nn.ModuleList(built.modules).parameters()),
        [built.modules[a:b] for a, b in pairwise(ends)],
        version_of(case.schedule, num_stages, case.num_microbatches),
        case.schedule is not pipedream_2bw,
    )
    losses = [reference.train(window, None) for window in windows_of(case)]
    return {"losses": losses, **dict(state_of(built.modules))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("which", "placement"),
    (
        ("few", equality.of_meshes(((0,),), ((1, 2),))),
        ("all", Placement.of(range(1), num_shards=2)),
        ("all", Placement.of(range(2), num_shards=2)),
        ("all", equality.of_meshes(((0,),), ((1, 2),))),
        ("all", equality.of_meshes(((0, 1),), ((2,),))),
        ("all", equality.of_meshes(((0, 1, 2, 3),), ((4,),), shapes=((2, 2), (1,)))),
    ),
    ids=("few-1 + 2", "1 x 2", "2 x 2", "1 + 2", "2 + 1", "2 x 2 + 1"),
)
def test_shards_keep_the_law_but_for_rounding(which: Any, placement: Any, tmp_path: Any) -> None:
    told: dict[str, Any] = {"which": which, "where": str(tmp_path)}
    results = call(train_in_shards, placement, tmp_path, timeout_s=250.0, **told)
    for case, *by_rank in zip(cases_in_shards(which), *results, strict=True):
        expected = train_with_delays(case, placement.num_stages)
        assert set().union(*by_rank) - {"divided"} == expected.keys()
        for found in by_rank:
            names = [name for name in expected if name in found]
            equality.assert_close(found, expected, names, str(case), within=1e-12)
    assert any(found["divided"] for found in results[-1])


def refused(mesh: penstock.Mesh) -> list[str]:
    """Say what is refused of replicas, and of processes that give different numbers of batches."""
    pipe = pipe_of(pipedream_2bw, None, mesh=mesh)
    said = []
    for count in (2, 2 + mesh.rank):
        with pytest.raises(ConfigError) as caught:
            pipe.train_steps(batches_of(count), adamw(pipe))
        said.append(str(caught.value))
    return said


@pytest.mark.slow
def test_replicas_are_refused_on_every_process(tmp_path: Path) -> None:
    for said in call(refused, (1, 2), tmp_path):
        assert "wait for the gradients of all 2 replicas" in said[0]
        assert "number of batches" in said[1]


def test_versions_of_a_tied_weight_count_on_its_home_stage_alone() -> None:
    for limits, told in (
        ((10, 10**6), "2 versions of 128 bytes on stage 0"),  # 8 x 4 in float32
        ((10**6, 10), "2 versions of 144 bytes on stage 1"),  # the middle layer's own
    ):
        captured = penstock.capture(TiedModules(), torch.randn(6, 4))
        stated: dict[str, Any] = {"partition": [1, 2], "memory_limit_bytes": limits}
        pipe = pipe_of(pipedream_2bw, layers=captured, **stated)
        with pipe, pytest.raises(ConfigError, match=told):
            pipe.train_steps([(torch.randn(6, 4), torch.randn(6, 8))], adamw(pipe))


def layers_of(*, seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [nn.Linear(4, 8), nn.Dropout(0.2), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 2)]


def batches_of(count: int, size: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 4, generator=g), torch.randn(size, 2, generator=g))
        for _ in range(count)
    ]


def pipe_of(
    schedule: Any, num_stages: int | None = 2, num_microbatches: int = 2, **options: Any
) -> Any:
    layers = options.pop("layers", None) or layers_of()
    told: dict[str, Any] = {"num_microbatches": num_microbatches, "loss": nn.MSELoss()}
    told |= {"schedule": schedule, "threads_per_stage": 1}
    return penstock.Pipeline(
        layers, None if "partition" in options else num_stages, **options, **told
    )


def adamw(pipe: penstock.Pipeline) -> torch.optim.Optimizer:
    return torch.optim.AdamW(pipe.parameters(), lr=0.01)


def assert_equal(one: penstock.Pipeline, other: penstock.Pipeline) -> None:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    assert all(same_bits(a, b) for (_, a), (_, b) in pairs)


@pytest.mark.parametrize("schedule", [gpipe, one_f_one_b, pipedream()], ids=repr)
def test_without_delay_it_is_a_loop_of_train_step(schedule: Family) -> None:
    num_stages, m = (1, 1) if schedule.is_asynchronous else (2, 3)
    with pipe_of(gpipe, num_stages, m) as looped, pipe_of(schedule, num_stages, m) as pipe:
        ours, theirs = adamw(pipe), adamw(looped)
        rates = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (ours, theirs)]
        found = pipe.train_steps(batches_of(4), ours, lr_scheduler=rates[0])
        wanted = []
        for batch in batches_of(4):
            wanted.append(looped.train_step(*batch))
            theirs.step()
            theirs.zero_grad()
            rates[1].step()
        assert same_bits(found, torch.stack(wanted))
        assert_equal(pipe, looped)
        assert_same_state(ours, theirs)
        assert pipe.step == looped.step == 4


def test_after_a_window_weights_are_the_newest_and_lie_where_they_lay() -> None:
    with pipe_of(pipedream(), 3) as pipe:
        places = [p.data_ptr() for p in pipe.parameters()]
        versions = [p._version for p in pipe.parameters()]
        optimizer = adamw(pipe)
        pipe.train_steps(batches_of(3), optimizer)
        assert [p.data_ptr() for p in pipe.parameters()] == places
        assert all(p._version > v for p, v in zip(pipe.parameters(), versions, strict=True))
        steps = {int(state["step"]) for state in optimizer.state.values()}
        assert steps == {6} and all(p.grad is None for p in pipe.parameters())
        with pipe_of(gpipe, 3) as other:
            other.load_state_dict(pipe.state_dict())
            x, _ = batches_of(1)[0]
            assert same_bits(pipe.eval_step(x), other.eval_step(x))


def test_a_forward_before_a_window_cannot_go_backward_after_it() -> None:
    with pipe_of(pipedream_2bw, recompute=penstock.Recompute.NEVER) as pipe:
        loss = pipe(batches_of(1)[0][0]).sum()
        pipe.train_steps(batches_of(2), adamw(pipe))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_memory_of_versions_is_counted() -> None:
    layers = [nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False)]
    trace = penstock.Trace.MEMORY
    with pipe_of(pipedream_2bw, 2, 1, layers=layers, trace=trace) as pipe:
        pipe.train_steps(batches_of(6, size=1), torch.optim.SGD(pipe.parameters(), lr=0.1))
        kinds = (s for s in pipe.last_timeline.memory if s.kind is MemoryKind.ACTIVATIONS)
        kept = [s.kept_bytes for s in kinds if s.stage == 0]
        assert kept[-1] == 0 and max(kept) >= 4 * 4 * 4


def test_a_frozen_weight_has_one_version() -> None:
    found, kept = [], {}
    for num_stages, is_frozen in ((2, True), (1, True), (2, False)):
        torch.manual_seed(0)
        layers = [nn.Linear(4, 4), nn.Linear(4, 64), nn.Linear(64, 2)]
        layers[1].requires_grad_(not is_frozen)
        trace = penstock.Trace.MEMORY
        partition = (2, 1) if num_stages == 2 else (3,)
        with pipe_of(pipedream_2bw, layers=layers, partition=partition, trace=trace) as pipe:
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1, weight_decay=0.1)
            losses = pipe.train_steps(batches_of(5), optimizer)
            kept[num_stages, is_frozen] = pipe.last_timeline.peak_bytes()[0]
            found.append([losses, *(p.detach() for p in pipe.parameters())])
    assert all(map(same_bits, found[0], found[1]))
    of_frozen = (4 * 64 + 64) * 4
    assert kept[2, False] - kept[2, True] >= of_frozen


class Repeated(nn.Embedding):  # writes to its weight in its forward
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(1.0)
        return x


def with_hook(pipe: penstock.Pipeline) -> torch.optim.Optimizer:
    optimizer = adamw(pipe)
    optimizer.register_step_post_hook(print)
    return optimizer


def with_stranger(pipe: penstock.Pipeline) -> torch.optim.Optimizer:
    return torch.optim.SGD([*pipe.parameters(), nn.Parameter(torch.ones(1))], lr=0.1)


class Counting(torch.optim.SGD):  # keeps what it counts in its groups
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = group["lr"] * 0.5
        return super().step(closure)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda pipe: torch.optim.LBFGS(pipe.parameters()), "looks at all weights at once"),
        (with_hook, "has step hooks"),
        (with_stranger, "1 of the optimizer's 7 parameters are on no stage here"),
        (lambda pipe: Counting(pipe.parameters(), lr=0.1), r"changes \['lr'\] of its parameter"),
    ],
)
def test_an_optimizer_that_cannot_step_by_stage_is_refused(make: Any, said: str) -> None:
    with pipe_of(pipedream_2bw) as pipe, pytest.raises(ConfigError, match=said):
        pipe.train_steps(batches_of(2), make(pipe))


def test_what_cannot_be_exact_is_refused() -> None:
    with pipe_of(pipedream_2bw) as pipe:
        optimizer = adamw(pipe)
        with pytest.raises(ConfigError, match=r"pipe\.train_steps\(batches, optimizer\)"):
            pipe.train_step(*batches_of(1)[0])
        with pytest.raises(ConfigError, match="no batches"):
            pipe.train_steps([], optimizer)
        with pytest.raises(BatchError, match=r"have \[2, 1\] micro-batches"):
            pipe.train_steps([*batches_of(1), *batches_of(1, size=1)], optimizer)
        x, y = batches_of(1)[0]
        with pytest.raises(ConfigError, match="an input requires grad"):
            pipe.train_steps([(x.requires_grad_(), y)], optimizer)


def test_a_layer_that_writes_to_its_weight_is_refused() -> None:
    layers = [Repeated(3, 4), nn.Linear(4, 8), nn.Linear(8, 2)]
    pipe = pipe_of(pipedream_2bw, layers=layers)
    with pipe, pytest.raises(StateError, match="changed a weight in its own forward"):
        pipe.train_steps(batches_of(2), adamw(pipe))


def test_parameters_that_share_memory_are_refused() -> None:
    layers = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)]
    layers[1].weight.data = layers[0].weight.data
    pipe = pipe_of(pipedream_2bw, layers=layers, num_stages=1)
    with pipe, pytest.raises(ConfigError, match="share memory"):
        pipe.train_steps(batches_of(2), adamw(pipe))


def test_a_failed_window_leaves_whole_versions_behind() -> None:
    with pipe_of(pipedream_2bw) as pipe:
        optimizer, bad = adamw(pipe), (torch.full((6, 4), 1.0), torch.ones(6, 3))
        with pytest.raises(UserWarning, match="in the loss, micro-batch 6"):
            pipe.train_steps([*batches_of(3), bad], optimizer)
        assert all(torch.isfinite(p).all() for p in pipe.parameters())
        optimizer.zero_grad()
        assert torch.isfinite(pipe.train_steps(batches_of(2), optimizer)).all()
