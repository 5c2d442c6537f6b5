"""What cannot work is refused in one clear error, with its remedy, before any gradient."""

import copy
import dataclasses
import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock import schedules
from penstock.errors import (
    BatchError,
    BoundaryError,
    ConfigError,
    ExecutionWarning,
    PartitionError,
    PlanError,
    ScheduleError,
)
from penstock.planner.candidates import Constraints
from penstock.planner.shared_cores import num_cores
from penstock.runtime.planning import device_of_process
from penstock.schedules import Backward, Forward, gpipe, pipedream, pipedream_2bw
from penstock.schedules.ir import Schedule
from tests.every_schedule import IN_TWO_PARTS
from tests.laws.test_equality_or_refusal import model
from tests.model_parts import Does
from tests.profiles import at_size, cluster, profile
from tests.side_by_side import assert_trains_like_unsplit
from tests.ways import IN_ONE_PROCESS


def layers() -> list[nn.Module]:
    """Give five layers on 6 features, 3 outputs."""
    return [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)]


def make(modules: Any = None, **options: Any) -> penstock.Pipeline:
    """Make a pipeline of two stages and two micro-batches, but for what `options` say."""
    if "partition" not in options:
        options.setdefault("num_stages", 2)
    options = {"num_microbatches": 2, "loss": F.mse_loss, "threads_per_stage": 1, **options}
    return penstock.Pipeline(layers() if modules is None else modules, **options)


def test_more_threads_than_cores_are_cut_down_with_a_warning() -> None:
    cores = num_cores()
    with pytest.warns(ExecutionWarning, match=f"threads_per_stage=100000, .* {cores} cores"):
        pipe = make(threads_per_stage=100_000)
    assert pipe.threads_per_stage == cores
    assert make(threads_per_stage=cores).threads_per_stage == cores


@pytest.mark.parametrize("devices", ("cuda:1", ["cpu", "cuda:0"], [0, 1]))
def test_devices_of_a_mesh_of_processes_are_those_of_its_processes(devices: Any) -> None:
    own = torch.device("cpu")
    with pytest.raises(ConfigError, match=r"devices=.*several processes.*Leave devices out"):
        device_of_process(devices, own)
    of_processes: tuple[Any, ...] = ("cpu", ["cpu", own])
    for same in of_processes:
        assert device_of_process(same, own) == "cpu"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE=abc in the environment; it must be a whole number of"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE=0 in the environment"),
        ({"WORLD_SIZE": "2"}, "RANK and MASTER_ADDR and MASTER_PORT are not set"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set: they cannot find each other"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT=x in the environment"),
        ({"RANK": "two"}, "RANK=two in the environment"),
        ({"RANK": "2"}, "RANK=2 with WORLD_SIZE=2: ranks count from 0, so the last one is 1"),
    ],
)
def test_variables_that_do_not_say_who_takes_part(
    variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name in good:
        monkeypatch.delenv(name, raising=False)
    for name, value in (variables if "WORLD_SIZE" in variables else good | variables).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        penstock.init_mesh(2, timeout_s=5.0)


@pytest.mark.parametrize("device", ("meta", "cuda:99"))
def test_a_device_that_processes_cannot_compute_on(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    said = rf"device='{device}'.*(needs? a backend|sees \d devices).*device=.cpu."
    with pytest.raises(ConfigError, match=said):
        penstock.init_mesh(2, timeout_s=5.0, device=device)


class Summed(nn.Module):
    """Reduce over the batch: what is left has no batch dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


def ragged(x: Tensor) -> Tensor:
    """Make a tensor that holds others: one of torch's own wrappers."""
    return torch.nested.as_nested_tensor(x, layout=torch.jagged)


class Labelled(Tensor):
    """A subclass whose tensors have an attribute."""

    label: str

    @classmethod
    def of(cls, x: Tensor) -> "Labelled":
        made = x.as_subclass(cls)
        made.label = "seen"
        return made


def local_class(x: Tensor) -> Tensor:
    class Local(Tensor):
        pass

    return x.as_subclass(Local)


def test_a_value_without_dimensions_inside_a_stage_is_the_models_business() -> None:
    modules = [nn.Linear(6, 6), Summed(), nn.Tanh()]
    with make(modules, partition=(1, 2), loss=lambda output, target: output) as pipe:
        assert pipe.train_step(torch.randn(4, 6)).dim() == 0


def tied(kind: str) -> list[nn.Module]:
    """Give layers of which the first and the last share a parameter, a module or a buffer."""
    modules = [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)]
    if kind == "weight":
        modules[2].weight = modules[0].weight
    elif kind == "module":
        modules[2] = modules[0]
    else:
        shared = torch.zeros(3)
        modules[0].register_buffer("shared", shared)
        modules[2].register_buffer("shared", shared)
    return modules


@pytest.mark.parametrize("kind", ("weight", "module", "buffer"))
def test_layers_that_share_on_one_stage_are_right(kind: str) -> None:
    made = model(lambda: [*tied(kind), nn.Linear(6, 3)])
    assert_trains_like_unsplit(made, 4, partition=(3, 1), num_microbatches=2)


def test_layers_that_share_are_never_balanced_apart() -> None:
    x, y = torch.randn(4, 6), torch.randn(4, 3)
    for num_stages in (2, 3):
        modules = tied("weight")
        try:
            with make([*modules, nn.Linear(6, 3)], num_stages=num_stages) as pipe:
                pipe.train_step(x, y)
        except PartitionError as error:
            assert "share" in str(error)
            assert all(p.grad is None for m in modules for p in m.parameters())


@pytest.mark.parametrize("schedule", (gpipe, pipedream_2bw))
def test_optimizers_and_schedulers_that_want_more_than_a_step(schedule: Any) -> None:
    batches = [(torch.randn(4, 6), torch.randn(4, 3))]
    with make(schedule=schedule) as pipe:
        sgd = torch.optim.SGD(pipe.parameters(), 0.1)
        waits = torch.optim.lr_scheduler.ReduceLROnPlateau(sgd)
        with pytest.raises(ConfigError, match=r"LBFGS.* several times in a step"):
            pipe.train_steps(batches, torch.optim.LBFGS(pipe.parameters()))
        with pytest.raises(ConfigError, match="ReduceLROnPlateau, which waits for a metric"):
            pipe.train_steps(batches, sgd, lr_scheduler=waits)
        assert all(parameter.grad is None for parameter in pipe.parameters())
        assert pipe.train_steps(iter(batches), sgd).shape == (1,)


def test_layers_to_recompute_that_lie_on_another_stage() -> None:
    other = [penstock.Recompute.layers(3), penstock.Recompute.layers(0)]
    with pytest.raises(ConfigError, match=r"recompute\[0\] .* layer 3, '.*', .* stage 1"):
        make(partition=(2, 3), recompute=other)
    for both in (other[::-1], penstock.Recompute.layers(0, 3)):
        plan = make(partition=(2, 3), recompute=both).plan
    wrong = dataclasses.replace(plan, recompute=tuple(other))
    with pytest.raises(ConfigError, match=r"recompute\[0\] .* name it in recompute\[1\]"):
        penstock.Pipeline(layers(), plan=wrong, loss=F.mse_loss)


def test_layers_to_recompute_that_may_come_to_be_on_another_stage() -> None:
    first, never = penstock.Recompute.layers("0", 1), penstock.Recompute.NEVER
    for other, named in ((never, 0), (penstock.Recompute.layers(0), 1)):
        told = rf"recompute\[0\] names layer {named}, .* on stage 1; give partition= too"
        with pytest.raises(ConfigError, match=told):
            make(recompute=[first, other])
    for others in (penstock.Recompute.STAGE, penstock.Recompute.layers(0, "1")):
        make(recompute=[first, others])


@pytest.mark.parametrize("schedule", (pipedream(), pipedream_2bw), ids=repr)
def test_what_looks_at_all_gradients_has_none_where_stages_update_by_themselves(
    schedule: Any,
) -> None:
    with make(schedule=schedule, partition=(2, 3)) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
        pipe.train_steps([(torch.randn(4, 6), torch.randn(4, 3))] * 2, optimizer)
        told = r"schedule=pipedream.* updates weights .* synchronous schedule"
        with pytest.raises(ConfigError, match=told + ", or a lower learning rate"):
            penstock.clip_grad_norm_(pipe, 1.0)
        with pytest.raises(ConfigError, match="bfloat16, which needs no loss scale"):
            penstock.GradScaler(pipe)
        assert penstock.GradScaler(pipe, enabled=False).get_scale() == 1.0
        with pytest.raises(ConfigError, match=r"give the optimizer .* to pipe\.train_steps"):
            pipe.train_step(torch.randn(4, 6), torch.randn(4, 3), loss_scale=2.0)
        F.mse_loss(pipe(torch.randn(4, 6)), torch.randn(4, 3)).backward()
        assert float(penstock.clip_grad_norm_(pipe, 1.0)) > 0  # a step of its own has gradients


X, Y = torch.zeros(4, 6), torch.zeros(4, 3)
MEASURED = profile(at_size(1), at_size(8))
HERE = cluster(4)
PLAN = penstock.plan(MEASURED, HERE, 16)


def odd(value: Any) -> Any:
    """Give a value of a type that is not allowed."""
    return value


def stepping(modules: list[nn.Module], optimizer: Any, **options: Any) -> None:
    """Train with an optimizer that `optimizer` makes of the pipeline's parameters."""
    made_of = ("lr_scheduler",)
    given = {name: options.pop(name) for name in made_of if name in options}
    with make(modules, partition=(2, 3), **options) as pipe:
        pipe.train_steps([(X, Y)] * 2, optimizer(pipe.parameters()), **given)


def adam(parameters: Any = None) -> torch.optim.Optimizer:
    """Make an optimizer of these parameters, or of those of another model."""
    return torch.optim.AdamW(nn.Linear(2, 2).parameters() if parameters is None else parameters)


Kind = type[Exception] | tuple[type[Exception], ...]


def told(
    call: Callable[..., Any],
    words: str,
    kind: Kind = ConfigError,
    model: Callable[[], Any] = layers,
) -> Any:
    """Make a case of a call with the layers of a model, and of what its refusal says."""
    return pytest.param(call, kind, words, model, id=words[:40])


def made(
    words: str, kind: Kind = ConfigError, model: Callable[[], Any] = layers, **options: Any
) -> Any:
    """Make a case of a pipeline with these options."""
    return told(partial(make, **options), words, kind, model)


def stepped(
    words: str,
    kind: Kind = ConfigError,
    model: Callable[[], Any] = layers,
    *,
    given: tuple[Any, ...] = (X, Y),
    call: str = "train_step",
    **options: Any,
) -> Any:
    """Make a case of a call of a pipeline with these options."""

    def step(modules: Any) -> None:
        with make(modules, **options) as pipe:
            getattr(pipe, call)(*given)

    return told(step, words, kind, model)


def trained(words: str, batches: Any, **options: Any) -> Any:
    """Make a case of training on these batches."""

    def train(modules: Any) -> None:
        with make(modules, **options) as pipe:
            pipe.train_steps(batches, torch.optim.SGD(pipe.parameters(), 0.1))

    return told(train, words)


def after(first: nn.Module, *more: nn.Module) -> Callable[[], list[nn.Module]]:
    """Give how to make layers, of which the first one has weights."""
    return lambda: [nn.Linear(6, 6), first, *more]


def named(outputs: Any, inputs: str) -> Callable[[], Any]:
    """Give how to make two layers that name what they give, and take."""
    return lambda: [
        penstock.Layer(nn.Linear(6, 6), outputs=outputs),
        penstock.Layer(nn.Linear(6, 3), inputs=inputs),
    ]


def without_grad(modules: list[nn.Module]) -> None:
    with make(modules) as pipe, torch.no_grad():
        pipe.train_step(X, Y)


def backward_first(k: int, m: int) -> Schedule:
    program = [
        tuple(x for i in range(m) for x in (Backward(s, i), Forward(s, i))) for s in range(k)
    ]
    return Schedule(tuple(program))


def descending(k: int, m: int) -> Schedule:
    return Schedule(tuple(p[:m] + p[:m:-1] + p[m : m + 1] for p in gpipe(k, m).programs))


def loss_of(word: str) -> Callable[..., Any]:
    """Give a loss that is no number."""
    return {
        r"shape \(2,\)": lambda o, t: ((o - t) ** 2).mean(1),
        r"shape \(1,\)": lambda o, t: (o - t).mean().reshape(1),
        "float": lambda o, t: 1.5,
        "NoneType": lambda o, t: None,
        "tuple": lambda o, t: (o.mean(), t.mean()),
    }[word]


COSTS = schedules.Costs(forward_s=1, backward_s=2)
OF_THREE = schedules.Costs(forward_s=(1, 2, 3), backward_s=2)
LIMIT = schedules.AtMostBytes(schedules.Sizes(kept_bytes=10), (100, 7))
COUNTS: tuple[Any, ...] = (0, -1, 1.5, "2", True)
NO_DEADLINES: tuple[Any, ...] = (0, -1.0, 1e10, math.inf, math.nan, "60", True)


REFUSED = [
    *(made(f"num_microbatches={n!r}.*at least 1", num_microbatches=n) for n in COUNTS),
    *(made(f"threads_per_stage={n!r}.*at least 1", threads_per_stage=n) for n in COUNTS),
    *(made(f"num_stages={n!r}.*at least 1", num_stages=n) for n in (0, -3, 2.0)),
    *(
        made(f"gradient_dtype={name!r}.*torch.float32 or torch.float64", gradient_dtype=given)
        for name, given in (("bfloat16", torch.bfloat16), ("int32", torch.int32), ("32", 32))
    ),
    made(r"num_stages=6.*5 layers.*at most 5", PartitionError, num_stages=6),
    made(r"num_stages=.*partition=", PartitionError, num_stages=None),
    *(
        made(
            rf"partition={re.escape(str([*given]))}.*{sum(given)} layers.*has 5.*sum to 5",
            PartitionError,
            partition=given,
        )
        for given in ((2, 2), (3, 3), (5, 5, 5))
    ),
    *(
        made("partition=.*at least one layer", PartitionError, partition=given)
        for given in ((0, 5), (6, -1), (5, 0), (2.5, 2.5), ())
    ),
    made(
        r"num_stages=3.*partition=\[2, 3\].*2 stages",
        PartitionError,
        num_stages=3,
        partition=(2, 3),
    ),
    *(made("at least one", model=kind, num_stages=1) for kind in (list, nn.Sequential)),
    made(r"Linear is no plain nn\.Sequential: give", model=lambda: nn.Linear(2, 2)),
    made(r"or a list of modules, got int", model=lambda: 3),
    made(r"layer 1 .*not an nn.Module", model=lambda: [nn.Linear(6, 6), torch.tanh]),
    made(r"'b'.*known here: input, a", model=named("a", "b")),
    stepped(r"names 2 outputs.*Tensor", model=named(("a", "b"), "a")),
    *(made(rf"{n} devices.*2 stages", devices=["cpu"] * n) for n in (1, 3)),
    *(
        told(partial(call, timeout_s=value), "timeout_s=.*above 0 and at most 31,536,000")
        for value in NO_DEADLINES
        for call in (make, lambda m, timeout_s: penstock.init_mesh(2, timeout_s=timeout_s))
    ),
    stepped(r"empty batch.*\(0, 6\)", BatchError, given=(X[:0], Y[:0])),
    *(
        stepped("empty batch", BatchError, given=(X[:0],), call=call)
        for call in ("eval_step", "forward")
    ),
    stepped("4.*5", BatchError, given=(X, torch.zeros(5, 3))),
    stepped(r"\[4, 5\]", BatchError, given=((X, torch.zeros(5, 6)), Y)),
    stepped("no tensor", BatchError, given=(3, Y)),
    stepped("no batch to cut", BatchError, given=(torch.tensor(1.0), Y)),
    *(
        stepped(got + r".*(?s:.)*one number", loss=loss_of(got), schedule=schedule)
        for got in (r"shape \(2,\)", r"shape \(1,\)", "float", "NoneType", "tuple")
        for schedule in (gpipe, IN_TWO_PARTS)
    ),
    stepped("needs a loss.*loss=", loss=None),
    stepped("requires grad", model=lambda: [m.requires_grad_(False) for m in layers()]),
    told(without_grad, "no_grad"),
    *(
        stepped(
            "(?s)(?=.*batch dimension.*one value)(?=.*stage 0).*Summed",
            BoundaryError,
            after(Summed(), nn.Tanh()),
            partition=(2, 1),
            transport=transport,
        )
        for transport in IN_ONE_PROCESS
    ),
    *(
        stepped(
            "leaves stage 0.*Return plain tensors",
            BoundaryError,
            after(Does(kind), nn.Tanh()),
            partition=(2, 1),
            transport=transport,
        )
        for kind in (ragged, Labelled.of, local_class)
        for transport in IN_ONE_PROCESS
    ),
    *(
        stepped(
            "leaves the last stage",
            BoundaryError,
            after(Does(kind)),
            given=(X,),
            call="eval_step",
        )
        for kind in (ragged, Labelled.of, local_class)
    ),
    *(
        stepped(r"shape \(", BoundaryError, after(last), given=(X,), call=call)
        for last in (Summed(), nn.Flatten(0))
        for call in ("eval_step", "forward")
    ),
    *(
        made(
            r"stage 0.*stage 1.*share.*layers 0 to 2 on one stage",
            PartitionError,
            partial(tied, kind),
            partition=(1, 2),
        )
        for kind in ("weight", "module", "buffer")
    ),
    *(
        stepped(words, (ConfigError, ScheduleError), schedule=schedule)
        for words, schedule in (
            ("2 stages.*gave 1", lambda k, m: Schedule(gpipe(k, m).programs[:1])),
            ("2 micro-batches.*gave 2 and 1", lambda k, m: gpipe(k, m - 1)),
            ("2 stages.*gave 3", lambda k, m: gpipe(k + 1, m)),
            ("rank 0", backward_first),
            ("rank 0", lambda k, m: Schedule(tuple(p[::-1] for p in gpipe(k, m).programs))),
            ("micro-batch", descending),
        )
    ),
    *(
        trained(words, batches, schedule=schedule)
        for schedule in (gpipe, pipedream_2bw)
        for words, batches in (
            ("given no batches", []),
            ("given a int as batches; give a list", 3),
            ("batch 0 of train_steps, a Tensor, is no pair", [X]),
            ("a tuple, is 1 values; give .inputs, targets. for each", [(X,)]),
        )
    ),
    *(
        trained(
            rf"on rank {rank}: {too_few} bytes too few for weights alone; .* keeps 2 versions",
            [(X, Y)],
            schedule=schedule,
            partition=(2, 3),
            memory_limit_bytes=limits,
        )
        for schedule, rank, too_few, limits in (
            (pipedream(), 0, (6 * 8 + 8) * 4 - 10, [10, 10**6]),
            (pipedream(vertical_sync=True), 1, (8 * 8 + 8 + 8 * 3 + 3) * 4 - 10, [10**6, 10]),
            (pipedream_2bw, 1, (8 * 8 + 8 + 8 * 3 + 3) * 4 - 10, [10**6, 10]),
        )
    ),
    stepped(
        "limit of rank 1: it needs 10 bytes .*, 3 more than limit_bytes=7; raise that to 10",
        schedule=schedules.searched(COSTS, LIMIT),
    ),
    *(
        stepped("3 .*stages", schedule=kind(OF_THREE))
        for kind in (schedules.searched, schedules.zb_h1)
    ),
    told(
        lambda m: schedules.Costs(forward_s=1, backward_s=-1),
        "backward_s is -1: no instruction takes less than 0",
    ),
    told(
        lambda m: make(m, schedule=schedules.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1B1")),
        r"line r \+ 1: rank 1, 1B1: stage 1 has 0 Forward",
        ScheduleError,
    ),
    *(
        made(r"partition=.*; give a list of whole numbers.*\[3, 2\]", PartitionError, partition=x)
        for x in (5, "23", (n for n in (2, 3)), torch.tensor([2, 3]), {2: 3})
    ),
    made("partition=.*at least one layer", PartitionError, partition=[2.0, 3.0]),
    made("loss='mse'.*give a function", loss="mse"),
    made(r"loss=CrossEntropyLoss is a class; give CrossEntropyLoss\(\)", loss=nn.CrossEntropyLoss),
    *(made(r'reduction=.*"mean", "sum", or a function', reduction=x) for x in ("average", None)),
    made(r"mesh=2; give .*penstock.init_mesh", mesh=2),
    made(r"trace='all'; give one of \"off\", \"time\", \"memory\", or True", trace="all"),
    *(
        made(
            rf"devices=.*{name}.*(not have|no values|no device).*leave devices out",
            devices=devices,
        )
        for name, devices in (
            *(("tpu", "tpu"), ("cuda:99", "cuda:99"), ("meta", ["cpu", "meta"])),
            *(("cpu:7", "cpu:7"), ("3.5", [3.5, "cpu"]), ("7.5", 7.5)),
        )
    ),
    *(
        told(
            partial(lambda m, name: penstock.Pipeline(m, plan=on_device(m, name)), name=name),
            rf"the plan has stage 1 on .*{name}.*placement\.devices",
            PlanError,
        )
        for name in ("tpu", "cuda:99", "meta", "cpu:7")
    ),
    made(r'recompute=True; .*"stage", .*Recompute\.layers\(', recompute=True),
    made(
        r"recompute= has 1 entry, .* 2 stages; give one .* or one for all",
        recompute=[penstock.Recompute.STAGE],
    ),
    made("offload= has 3 entries, .* 2 stages", offload=[True, False, True]),
    made("offload_folder=3; give the path of a folder", offload_folder=3),
    made("offload_folder='nowhere'.*cannot hold.*folder that is there", offload_folder="nowhere"),
    *(
        told(
            partial(lambda m, pipe: penstock.clip_grad_norm_(pipe, 1.0), pipe=pipe),
            r"pipe=.*; give the pipeline, a penstock\.Pipeline",
        )
        for pipe in (None, "pipe", [torch.zeros(2)])
    ),
    *(
        told(partial(stepping, optimizer=lambda _, given=given: given, schedule=schedule), words)
        for schedule in (gpipe, pipedream_2bw)
        for given, words in (
            (None, r"optimizer=None; give an optimizer of pipe\.parameters\(\)"),
            (adam(), r"none of the optimizer's 2 parameters .*pipe\.parameters\(\)"),
        )
    ),
    *(
        told(partial(stepping, optimizer=adam, schedule=schedule, lr_scheduler=given), words)
        for schedule in (gpipe, pipedream_2bw)
        for given, words in (
            ("cosine", "lr_scheduler='cosine'; give a scheduler of the optimizer"),
            (
                torch.optim.lr_scheduler.StepLR(adam(), 1),
                "lr_scheduler=.*of another optimizer.*would never change",
            ),
        )
    ),
    *(
        told(partial(lambda m, x: schedules.from_csv(x), x=x), words, ScheduleError)
        for x, words in (
            ("nowhere.csv", "nowhere.csv.*No such file.*path of a CSV file"),
            ("/", "/: .*directory.*path of a CSV file"),
            (None, "from_csv.None.*path of a CSV file"),
        )
    ),
    told(
        lambda m: penstock.plan(odd(None), HERE, 16),
        r"model=None without example_inputs=.*penstock\.profile\(",
    ),
    told(
        lambda m: penstock.plan(MEASURED, odd("dgx-h100"), 16),
        r"cluster='dgx-h100'; give .*Cluster\.load\('dgx-h100'\)",
    ),
    told(
        lambda m: penstock.simulate(odd(None), HERE, PLAN),
        r"profile=None; give .*penstock\.profile",
    ),
    told(
        lambda m: penstock.simulate(MEASURED, odd("x"), PLAN), r"cluster='x'; give .*Cluster\.load"
    ),
    told(
        lambda m: penstock.simulate(MEASURED, HERE, odd("plan.json")),
        r"plan='plan.json'; give .*Plan",
    ),
    told(
        lambda m: penstock.profile(m, X, optimizer=odd(None)), r"optimizer=None; give a function"
    ),
    told(lambda m: penstock.profile(m, None), "example_inputs=None; give a batch"),
    told(
        lambda m: penstock.Plan.from_json(
            PLAN.to_json().replace('parameters": ', 'parameters": -')
        ),
        "num_parameters of layer '0' is -16; it must be at least 0",
    ),
    told(
        lambda m: penstock.Profile.from_json(
            MEASURED.to_json().replace('"flops": ', '"flops": -')
        ),
        r"sizes\[0\]\.kinds\[0\]\.operators\[0\]\.flops is -.*at least 0",
    ),
    *(
        told(partial(lambda m, given: replace(PLAN, **given), given=given), rf"{name}.*at least")
        for name, given in (
            ("predicted_s", {"predicted_s": (-1.0,) * PLAN.num_stages}),
            ("predicted_step_s", {"predicted_step_s": -0.5}),
            ("batch_size", {"batch_size": -16}),
        )
    ),
    *(
        told(
            partial(
                lambda m, constraints: penstock.plan(MEASURED, HERE, 16, constraints=constraints),
                constraints=Constraints(batch_size=16, **odd(constraints)),
            ),
            words,
        )
        for constraints, words in (
            ({"num_ranks": 10**6}, r"num_ranks=1000000.*2 stages at most"),
            ({"num_ranks": 3}, r"num_ranks=3.*2 (stages|parts)"),
            ({"num_ranks": 2, "num_replicas": 10**5}, r"num_replicas=100000"),
            ({"num_replicas": 2, "num_microbatches": 9}, r"batch_size=16.*num_microbatches=9"),
        )
    ),
    told(lambda m: penstock.GradScaler(make(m), init_scale=0), "init_scale=0; .*above 0"),
    told(lambda m: make(m).schedule_for(0), "num_microbatches=0; .*at least 1"),
    *(
        told(partial(lambda m, x: penstock.Plan.load(x), x=x), words, PlanError)
        for x, words in (
            (PLAN.to_json(), r"path.*text.*Plan\.from_json"),
            (PLAN.to_json().replace("\n", " "), r"path.*text.*Plan\.from_json"),
            (3, "path=3; give the path"),
        )
    ),
    told(lambda m: PLAN.save(odd(3)), "path=3; give the path", PlanError),
    told(
        lambda m: make(m).train_step(X, [torch.zeros(4, 3)] * 4),
        r"targets hold a list of 4 .* 4 rows each.*torch\.stack\(.*tuple\(",
        BatchError,
    ),
]


def modules_in(given: Any) -> list[nn.Module]:
    """List the modules of what a pipeline is given."""
    entries = given if isinstance(given, list) else []
    found = [getattr(entry, "module", entry) for entry in entries]
    return [module for module in found if isinstance(module, nn.Module)]


def on_device(modules: list[nn.Module], name: str) -> penstock.Plan:
    """Give a plan that has the second stage on another device."""
    with make(modules) as pipe:
        plan = pipe.plan
    return replace(plan, placement=replace(plan.placement, devices=("cpu", name)))


@pytest.mark.parametrize(("call", "kind", "words", "model"), REFUSED)
def test_what_cannot_work_is_refused_in_a_line_before_anything_changes(
    call: Callable[[Any], Any],
    kind: Kind,
    words: str,
    model: Callable[[], Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = model()
    held = given if isinstance(given, nn.Module) else nn.ModuleList(modules_in(given))
    before = copy.deepcopy(held)
    with pytest.raises(kind, match=words) as caught:
        call(given)
    _, *drawn = str(caught.value).split("\n")
    assert all(re.match(r"\s*rank \d+ \|", line) for line in drawn), "more than a schedule"
    pairs = zip(held.parameters(), before.parameters(), strict=True)
    assert all(p.grad is None and torch.equal(p, b) for p, b in pairs)
    assert not list(tmp_path.iterdir())
