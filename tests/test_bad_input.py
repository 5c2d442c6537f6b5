"""What cannot work is refused in one clear error, with its remedy, before any gradient."""

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
from penstock.planner.candidates import Wishes
from penstock.runtime.devices import num_cores
from penstock.runtime.planning import device_of_process
from penstock.schedules import ALL_SCHEDULES, Backward, Forward, gpipe, pipedream, pipedream_2bw
from penstock.schedules.ir import Schedule
from tests.profiles import at_size, cluster, profile
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


def refused_step(
    kind: type[Exception] | tuple[type[Exception], ...],
    message: str,
    modules: list[nn.Module] | None = None,
    x: Any = None,
    y: Any = None,
    **options: Any,
) -> Exception:
    """Check that a pipeline or its step is refused, and that no parameter has a gradient then."""
    modules = layers() if modules is None else modules
    x = torch.randn(4, 6) if x is None else x
    y = torch.randn(4, 3) if y is None else y
    with pytest.raises(kind, match=message) as caught, make(modules, **options) as pipe:
        pipe.train_step(x, y)
    assert all(p.grad is None for module in modules for p in module.parameters())
    return caught.value


@pytest.mark.parametrize("count", (0, -1, 1.5, "2", True))
def test_less_than_one_micro_batch(count: Any) -> None:
    with pytest.raises(ConfigError, match=f"num_microbatches={count!r}.*at least 1"):
        make(num_microbatches=count)


@pytest.mark.parametrize("count", (0, -1, 1.5, "2", True))
def test_less_than_one_thread(count: Any) -> None:
    with pytest.raises(ConfigError, match=f"threads_per_stage={count!r}.*at least 1"):
        make(threads_per_stage=count)


def test_more_threads_than_cores_are_cut_down_with_a_warning() -> None:
    cores = num_cores()
    with pytest.warns(ExecutionWarning, match=f"threads_per_stage=100000, .* {cores} cores"):
        pipe = make(threads_per_stage=100_000)
    assert pipe.threads_per_stage == cores
    assert make(threads_per_stage=cores).threads_per_stage == cores


@pytest.mark.parametrize("count", (0, -3, 2.0))
def test_less_than_one_stage(count: Any) -> None:
    with pytest.raises(ConfigError, match=f"num_stages={count!r}.*at least 1"):
        make(num_stages=count)


def test_more_stages_than_layers() -> None:
    with pytest.raises(PartitionError, match=r"num_stages=6.*5 layers.*at most 5"):
        make(num_stages=6)


def test_neither_stages_nor_partition() -> None:
    with pytest.raises(PartitionError, match=r"num_stages=.*partition="):
        make(num_stages=None)


@pytest.mark.parametrize("partition, total", [((2, 2), 4), ((3, 3), 6), ((5, 5, 5), 15)])
def test_partition_that_does_not_sum_to_the_layers(partition: tuple[int, ...], total: int) -> None:
    message = rf"partition={re.escape(str(list(partition)))}.*{total} layers.*has 5.*sum to 5"
    with pytest.raises(PartitionError, match=message):
        make(partition=partition)


@pytest.mark.parametrize("partition", [(0, 5), (6, -1), (5, 0), (2.5, 2.5), ()])
def test_partition_with_an_empty_stage(partition: tuple[Any, ...]) -> None:
    with pytest.raises(PartitionError, match="at least one layer"):
        make(partition=partition)


def test_stages_and_partition_that_disagree() -> None:
    with pytest.raises(PartitionError, match=r"num_stages=3.*partition=\[2, 3\].*2 stages"):
        make(num_stages=3, partition=(2, 3))


@pytest.mark.parametrize("model", ([], nn.Sequential()))
def test_a_model_without_layers(model: Any) -> None:
    with pytest.raises(ConfigError, match="at least one"):
        make(model, num_stages=1)


def test_a_model_that_is_no_list_of_layers() -> None:
    with pytest.raises(ConfigError, match=r"Linear is no plain nn\.Sequential: give"):
        make(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=r"or a list of modules, got int"):
        make(3)


def test_a_layer_that_is_no_module() -> None:
    with pytest.raises(ConfigError, match=r"layer 1 .*not an nn.Module"):
        make([nn.Linear(6, 6), torch.tanh])


def test_a_value_that_no_layer_gives() -> None:
    model = [
        penstock.Layer(nn.Linear(6, 6), outputs="a"),
        penstock.Layer(nn.Linear(6, 3), inputs="b"),
    ]
    with pytest.raises(ConfigError, match=r"'b'.*known here: input, a"):
        make(model)


def test_a_layer_that_returns_fewer_values_than_it_names() -> None:
    first = nn.Linear(6, 6)
    model = [
        penstock.Layer(first, outputs=("a", "b")),
        penstock.Layer(nn.Linear(6, 3), inputs="a"),
    ]
    with make(model) as pipe, pytest.raises(ConfigError, match=r"names 2 outputs.*Tensor"):
        pipe.train_step(torch.randn(4, 6), torch.randn(4, 3))
    assert first.weight.grad is None


@pytest.mark.parametrize("count", (1, 3))
def test_a_wrong_number_of_devices(count: int) -> None:
    with pytest.raises(ConfigError, match=rf"{count} devices.*2 stages"):
        make(devices=["cpu"] * count)


@pytest.mark.parametrize("devices", ("cuda:1", ["cpu", "cuda:0"], [0, 1]))
def test_devices_of_a_mesh_of_processes_are_those_of_its_processes(devices: Any) -> None:
    own = torch.device("cpu")
    with pytest.raises(ConfigError, match=r"devices=.*several processes.*Leave devices out"):
        device_of_process(devices, own)
    of_processes: tuple[Any, ...] = ("cpu", ["cpu", own])
    for same in of_processes:
        assert device_of_process(same, own) == "cpu"


@pytest.mark.parametrize("timeout_s", (0, -1.0, 1e10, math.inf, math.nan, "60", True))
def test_a_deadline_that_no_wait_can_have(timeout_s: Any) -> None:
    for refused in (partial(make, timeout_s=timeout_s), partial(penstock.init_mesh, 2)):
        with pytest.raises(ConfigError, match=r"timeout_s=.*above 0 and at most 31,536,000"):
            refused(timeout_s=timeout_s)


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
    said = rf"device='{device}'.*(torch's backend|sees \d devices).*leave device out"
    with pytest.raises(ConfigError, match=said):
        penstock.init_mesh(2, timeout_s=5.0, device=device)


def test_an_empty_batch() -> None:
    refused_step(BatchError, r"empty batch.*\(0, 6\)", x=torch.randn(0, 6), y=torch.randn(0, 3))
    for call in ("eval_step", "forward"):
        with make() as pipe, pytest.raises(BatchError, match="empty batch"):
            getattr(pipe, call)(torch.randn(0, 6))


def test_inputs_and_targets_of_different_batch_size() -> None:
    refused_step(BatchError, r"4.*5", x=torch.randn(4, 6), y=torch.randn(5, 3))


def test_inputs_of_different_batch_sizes() -> None:
    refused_step(BatchError, r"\[4, 5\]", x=(torch.randn(4, 6), torch.randn(5, 6)))


def test_inputs_without_a_batch() -> None:
    refused_step(BatchError, "no tensor", x=3)
    refused_step(BatchError, "without dimensions", x=torch.tensor(1.0))


@pytest.mark.parametrize(
    "loss, got",
    [
        pytest.param(lambda o, t: ((o - t) ** 2).mean(1), r"shape \(2,\)", id="one per sample"),
        pytest.param(lambda o, t: (o - t).mean().reshape(1), r"shape \(1,\)", id="one-element"),
        pytest.param(lambda o, t: 1.5, "float", id="number"),
        pytest.param(lambda o, t: None, "NoneType", id="nothing"),
        pytest.param(lambda o, t: (o.mean(), t.mean()), "tuple", id="tuple"),
    ],
)
@pytest.mark.parametrize("schedule", ALL_SCHEDULES, ids=lambda s: s.name)
def test_a_loss_that_is_no_scalar(loss: Callable[..., Any], got: str, schedule: Any) -> None:
    refused_step(ConfigError, got + r".*(?s:.)*one number", loss=loss, schedule=schedule)


def test_a_step_without_a_loss() -> None:
    refused_step(ConfigError, r"needs a loss.*loss=", loss=None)


def test_a_loss_of_which_nothing_depends() -> None:
    modules = [module.requires_grad_(False) for module in layers()]
    refused_step(ConfigError, "requires grad", modules)


def test_a_step_without_gradients() -> None:
    with make() as pipe, torch.no_grad(), pytest.raises(ConfigError, match="no_grad"):
        pipe.train_step(torch.randn(4, 6), torch.randn(4, 3))


class Summed(nn.Module):
    """Reduce over the batch: what is left has no batch dimension."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


@pytest.mark.parametrize("transport", IN_ONE_PROCESS)
def test_a_value_without_dimensions_at_a_boundary(transport: penstock.Transport) -> None:
    modules = [nn.Linear(6, 6), Summed(), nn.Tanh()]
    error = refused_step(
        BoundaryError, "batch dimension.*one value", modules, partition=(2, 1), transport=transport
    )
    assert "stage 0" in " ".join([str(error), *error.__notes__])
    assert "Summed" in " ".join([str(error), *error.__notes__])


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


class Giving(nn.Module):
    """Give what a function makes of the input."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


def local_class(x: Tensor) -> Tensor:
    class Local(Tensor):
        pass

    return x.as_subclass(Local)


@pytest.mark.parametrize("make_it", (ragged, Labelled.of, local_class))
@pytest.mark.parametrize("transport", IN_ONE_PROCESS)
def test_a_tensor_that_holds_more_than_values_at_a_boundary(
    transport: penstock.Transport, make_it: Callable[[Tensor], Any]
) -> None:
    modules = [nn.Linear(6, 6), Giving(make_it), nn.Tanh()]
    refused_step(
        BoundaryError,
        "leaves stage 0.*Return plain tensors",
        modules,
        partition=(2, 1),
        transport=transport,
    )
    with make(modules[:2]) as pipe, pytest.raises(BoundaryError, match="leaves the last stage"):
        pipe.eval_step(torch.randn(4, 6))


def test_a_value_without_dimensions_inside_a_stage_is_the_models_business() -> None:
    modules = [nn.Linear(6, 6), Summed(), nn.Tanh()]
    with make(modules, partition=(1, 2), loss=lambda output, target: output) as pipe:
        assert pipe.train_step(torch.randn(4, 6)).dim() == 0


@pytest.mark.parametrize("module", (Summed(), nn.Flatten(0)))
def test_an_output_without_a_batch_cannot_be_put_together(module: nn.Module) -> None:
    for call in ("eval_step", "forward"):
        with (
            make([nn.Linear(6, 6), module]) as pipe,
            pytest.raises(BoundaryError, match=r"shape \("),
        ):
            getattr(pipe, call)(torch.randn(4, 6))


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
def test_layers_that_share_across_stages_are_refused_with_a_partition_that_works(
    kind: str,
) -> None:
    with pytest.raises(
        PartitionError, match=r"stage 0.*stage 1.*share.*layers 0 to 2 on one stage"
    ):
        make(tied(kind), partition=(1, 2))


@pytest.mark.parametrize("kind", ("weight", "module", "buffer"))
def test_layers_that_share_on_one_stage_are_right(kind: str) -> None:
    ours, theirs = tied(kind), tied(kind)
    for a, b in zip(ours, theirs, strict=True):
        b.load_state_dict(a.state_dict())
    x, y = torch.randn(4, 6), torch.randn(4, 3)
    with make([*ours, nn.Identity()], partition=(3, 1), loss=_first_three) as pipe:
        pipe.train_step(x, y)
    for x_i, y_i in zip(x.split(2), y.split(2), strict=True):
        (_first_three(nn.Sequential(*theirs)(x_i), y_i) * 0.5).backward()
    assert all(
        torch.equal(_grad(a), _grad(b))
        for a, b in zip(
            nn.ModuleList(ours).parameters(), nn.ModuleList(theirs).parameters(), strict=True
        )
    )


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


@pytest.mark.parametrize(
    "broken, message",
    [
        pytest.param(
            lambda k, m: Schedule(gpipe(k, m).programs[:1]),
            "2 stages.*gave 1",
            id="a stage missing",
        ),
        pytest.param(
            lambda k, m: gpipe(k, m - 1),
            "2 micro-batches.*gave 2 and 1",
            id="a micro-batch missing",
        ),
        pytest.param(lambda k, m: gpipe(k + 1, m), "2 stages.*gave 3", id="a stage too many"),
        pytest.param(
            lambda k, m: Schedule(
                tuple(
                    tuple(x for i in range(m) for x in (Backward(s, i), Forward(s, i)))
                    for s in range(k)
                )
            ),
            "rank 0",
            id="backward first",
        ),
        pytest.param(
            lambda k, m: Schedule(tuple(p[::-1] for p in gpipe(k, m).programs)),
            "rank 0",
            id="reversed",
        ),
        pytest.param(
            lambda k, m: Schedule(
                tuple(p[:m] + p[:m:-1] + p[m : m + 1] for p in gpipe(k, m).programs)
            ),
            "micro-batch",
            id="backwards not ascending",
        ),
    ],
)
def test_a_schedule_that_is_not_one_for_this_pipeline(broken: Any, message: str) -> None:
    refused_step((ConfigError, ScheduleError), message, schedule=broken)


def _first_three(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output[:, :3], target)


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


@pytest.mark.parametrize("schedule", (gpipe, pipedream_2bw))
@pytest.mark.parametrize(
    "batches, message",
    (
        ([], "given no batches"),
        (3, "given a int as batches; give a list"),
        ([torch.zeros(4, 6)], "batch 0 of train_steps, a Tensor, is no pair"),
        ([(torch.zeros(4, 6),)], "a tuple, is 1 values; give .inputs, targets. for each"),
    ),
)
def test_batches_that_are_no_pairs(schedule: Any, batches: Any, message: str) -> None:
    with make(schedule=schedule) as pipe, pytest.raises(ConfigError, match=message):
        pipe.train_steps(batches, torch.optim.SGD(pipe.parameters(), 0.1))


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


@pytest.mark.parametrize(
    ("schedule", "rank"),
    [(pipedream(), 0), (pipedream(vertical_sync=True), 1), (pipedream_2bw, 1)],
)
def test_versions_of_weights_beyond_the_memory_stated(schedule: Any, rank: int) -> None:
    limits = [10**6, 10**6]
    limits[rank] = 10
    of_stage = (6 * 8 + 8, 8 * 8 + 8 + 8 * 3 + 3)[rank] * 4
    told = rf"on rank {rank}: {of_stage - 10} bytes too few for weights alone; .* keeps 2 versions"
    with make(schedule=schedule, partition=(2, 3), memory_limit_bytes=limits) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), 0.1)
        with pytest.raises(ConfigError, match=told):
            pipe.train_steps([(torch.randn(4, 6), torch.randn(4, 3))], optimizer)
        assert all(parameter.grad is None for parameter in pipe.parameters())


def test_a_search_without_an_answer_and_costs_that_do_not_fit() -> None:
    costs, sizes = schedules.Costs(forward_s=1, backward_s=2), schedules.Sizes(kept_bytes=10)
    limit = schedules.AtMostBytes(sizes, (100, 7))
    told = "limit of rank 1: it needs 10 bytes .*, 3 more than limit_bytes=7; raise that to 10"
    refused_step(ConfigError, told, schedule=schedules.searched(costs, limit))
    of_three = schedules.Costs(forward_s=(1, 2, 3), backward_s=2)
    for family in (schedules.searched(of_three), schedules.zb_h1(of_three)):
        refused_step(ConfigError, "3 .*stages", schedule=family)
    with pytest.raises(ConfigError, match="backward_s is -1: no instruction takes less than 0"):
        schedules.Costs(forward_s=1, backward_s=-1)


def test_a_schedule_in_csv_with_an_action_missing() -> None:
    with pytest.raises(ScheduleError, match=r"line r \+ 1: rank 1, 1B1: stage 1 has 0 Forward"):
        make(schedule=schedules.from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1B1"))


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


def told(call: Callable[..., Any], words: str, kind: type[Exception] = ConfigError) -> Any:
    """Make a case of a call with the layers of a model, and of what its refusal says."""
    return pytest.param(call, kind, words, id=words[:40])


def made(words: str, kind: type[Exception] = ConfigError, **options: Any) -> Any:
    """Make a case of a pipeline with these options."""
    return told(partial(make, **options), words, kind)


REFUSED = [
    *(
        made(r"partition=.*; give a list of whole numbers.*\[3, 2\]", PartitionError, partition=x)
        for x in (5, "23", (n for n in (2, 3)), torch.tensor([2, 3]), {2: 3})
    ),
    made("partition=.*at least one layer", PartitionError, partition=[2.0, 3.0]),
    made("loss='mse'.*give a function", loss="mse"),
    made(r"loss=CrossEntropyLoss is a class; give CrossEntropyLoss\(\)", loss=nn.CrossEntropyLoss),
    *(
        made(r"reduction=.*Reduction.MEAN, Reduction.SUM, or a function", reduction=x)
        for x in ("mean", None)
    ),
    made(r"mesh=2; give .*penstock.init_mesh", mesh=2),
    made(r"trace='memory'.*Trace.OFF, Trace.TIME, Trace.MEMORY", trace="memory"),
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
    made(r"recompute=True; .*Recompute\.STAGE, .*Recompute\.layers\(", recompute=True),
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
        told(
            partial(lambda m, given: penstock.zero_optimizer(make(m), given), given=given),
            r"optimizer_class=.*; give the class, such as torch\.optim\.AdamW",
        )
        for given in ("adamw", adam(), None)
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
        lambda m: penstock.plan(odd(None), HERE, 16), r"profile=None; give .*penstock\.profile\("
    ),
    told(
        lambda m: penstock.plan(MEASURED, odd("dgx-h100"), 16),
        r"cluster='dgx-h100'; give .*Cluster\.load\('dgx-h100'\)",
    ),
    told(
        lambda m: penstock.simulate(PLAN, odd(None), HERE),
        r"profile=None; give .*penstock\.profile",
    ),
    told(
        lambda m: penstock.simulate(PLAN, MEASURED, odd("x")), r"cluster='x'; give .*Cluster\.load"
    ),
    told(
        lambda m: penstock.simulate(odd("plan.json"), MEASURED, HERE),
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
                lambda m, wishes: penstock.plan(MEASURED, HERE, 16, wishes=wishes),
                wishes=Wishes(batch_size=16, **odd(wishes)),
            ),
            words,
        )
        for wishes, words in (
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


def on_device(modules: list[nn.Module], name: str) -> penstock.Plan:
    """Give a plan that has the second stage on another device."""
    with make(modules) as pipe:
        plan = pipe.plan
    return replace(plan, placement=replace(plan.placement, devices=("cpu", name)))


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_what_cannot_work_is_refused_in_a_line_before_anything_changes(
    call: Callable[[list[nn.Module]], Any],
    kind: type[Exception],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    modules = layers()
    before = [p.detach().clone() for module in modules for p in module.parameters()]
    with pytest.raises(kind, match=words) as caught:
        call(modules)
    assert "\n" not in str(caught.value)
    after = [p for module in modules for p in module.parameters()]
    assert all(p.grad is None and torch.equal(p, b) for p, b in zip(after, before, strict=True))
    assert not list(tmp_path.iterdir())
