"""Pipelines on pretended GPUs: the bits of the same run on the CPU, and no race."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from benchmarks.all_pairs import all_pairs
from penstock import Recompute, Trace, Transport
from penstock.schedules import gpipe, interleaved_1f1b, one_f_one_b, zb_h1
from tests.models import unet
from tests.ways import IN_ONE_PROCESS

from .memory import Memory

WIDTH, NUM_STAGES, NUM_STEPS = 6, 4, 2


class Tied(nn.Module):
    """The first and the last stage use one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.middle = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.middle:
            x = layer(x).tanh()
        return F.linear(x, self.first.weight)[:, :3]


def chain() -> list[Any]:
    return [
        *(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), nn.Dropout(0.2)),
        *(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh()),
        *(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, 3)),
    ]


def tied() -> Any:
    return Tied()


PARTITION = {chain: (3, 2, 2, 2), unet: (2, 2, 2, 1), tied: (1, 1, 1, 1)}
"""The layers on each stage; given, so that no layer is measured first."""


class Case(NamedTuple):
    """One way to train on pretended GPUs; `batch` is the device of the batch."""

    model: Callable[[], Any]
    schedule: Any
    memory: dict[str, Any]
    devices: tuple[str, ...]
    transport: Transport
    batch: str
    on_side_stream: bool

    def __str__(self) -> str:
        memory = "offload" if "offload" in self.memory else self.memory["recompute"].value
        where = "-".join(name.replace("cuda:", "") for name in self.devices)
        words = (self.model.__name__, self.schedule.name, memory, where, self.transport.name)
        return "-".join((*words, f"of_{self.batch}", "side" if self.on_side_stream else "default"))


CASES = [
    Case(*values)
    for values in all_pairs(
        (
            (chain, unet, tied),
            (gpipe, one_f_one_b, interleaved_1f1b(2), zb_h1()),
            (
                *({"recompute": policy} for policy in Recompute),
                {"recompute": Recompute.NEVER, "offload": True},
            ),
            (
                ("cuda:0",) * NUM_STAGES,
                ("cuda:0", "cuda:1", "cuda:0", "cuda:1"),
                ("cuda:0", "cpu", "cuda:1", "cpu"),
                ("cpu", "cuda:0", "cuda:0", "cuda:1"),
            ),
            IN_ONE_PROCESS,
            ("cpu", "cuda:0", "cuda:1"),
            (False, True),
        )
    )
]


@contextmanager
def as_caller(case: Case) -> Iterator[None]:
    """Call on streams of the caller's own, one on each GPU, or on the default ones."""
    if not case.on_side_stream:
        yield
        return
    one, other = (torch.cuda.Stream(device) for device in ("cuda:1", "cuda:0"))
    with torch.cuda.stream(one), torch.cuda.stream(other):
        yield


def piped(case: Case, devices: Any, **options: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    layers = case.model()
    example = torch.randn(8, WIDTH) if isinstance(layers, nn.Module) else None
    how = {"schedule": case.schedule, "transport": case.transport, "seed": 3, **case.memory}
    how |= {"num_microbatches": 4, "example_inputs": example, "devices": devices}
    how |= {"partition": PARTITION[case.model]}
    return penstock.Pipeline(layers, NUM_STAGES, **how, **options)


def new_batch(step: int, device: str) -> tuple[Tensor, Tensor]:
    """Make a batch of 8 samples on the caller's stream, where it waits for nothing."""
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, WIDTH, generator=generator), torch.randn(8, 3, generator=generator)
    return x.to(device) * 1, y.to(device) * 1


def train(pipe: penstock.Pipeline, device: str) -> list[Any]:
    """Take some steps; overwrite each batch afterwards; return losses, outputs and gradients."""
    found: list[Any] = []
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9, foreach=False)
    for step in range(NUM_STEPS):
        x, y = new_batch(step, device)
        loss = pipe.train_step(x, y)
        x.zero_()
        y.zero_()
        found.append((loss * 1).tolist())
        found += [p.grad.tolist() for p in pipe.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return found


def differentiated(pipe: penstock.Pipeline, device: str) -> list[Any]:
    """Run forward and backward through the module form, then evaluate."""
    found: list[Any] = []
    for step in range(NUM_STEPS):
        x, y = new_batch(step, device)
        x.requires_grad_()
        output = pipe(x)
        loss = F.mse_loss(output * 1, y.to(output.device))
        loss.backward()
        assert x.grad is not None
        found += [loss.tolist(), (x.grad * 1).tolist()]
        with torch.no_grad():
            x.zero_()
            trained = [(p, p.grad) for p in pipe.parameters() if p.grad is not None]
            found += [gradient.tolist() for _, gradient in trained]
            for p, gradient in trained:
                p.sub_(0.1 * gradient)
        pipe.zero_grad()
        del output, loss, trained
        found.append((pipe.eval_step(x.detach()) * 1).tolist())
    return found


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_are_those_on_the_cpu_without_races(memory: Memory, case: Case) -> None:
    with piped(case, "cpu", loss=F.mse_loss) as pipe:
        wanted = train(pipe, "cpu")
    with as_caller(case), piped(case, case.devices, loss=F.mse_loss) as pipe:
        assert train(pipe, case.batch) == wanted
    assert memory.races == []
    assert memory.num_uses > 100


@pytest.mark.parametrize("case", CASES[::8], ids=str)
def test_the_module_form_is_that_on_the_cpu_without_races(memory: Memory, case: Case) -> None:
    with piped(case, "cpu") as pipe:
        wanted = differentiated(pipe, "cpu")
    with as_caller(case), piped(case, case.devices) as pipe:
        assert differentiated(pipe, case.batch) == wanted
    assert memory.races == []


@pytest.mark.parametrize("trace", (Trace.TIME, Trace.MEMORY))
def test_a_traced_run_has_no_races(memory: Memory, trace: Trace) -> None:
    case = CASES[0]._replace(devices=("cuda:0", "cuda:1", "cpu", "cuda:0"), model=chain)
    with piped(case, case.devices, loss=F.mse_loss, trace=trace) as pipe:
        train(pipe, "cuda:0")
        assert pipe.last_timeline is not None
        assert pipe.last_timeline.step_s > 0
    assert memory.races == []


@pytest.mark.parametrize("devices", [["cuda:0", "cuda:1"], ["cuda:1", "cuda:1"]], ids=str)
def test_a_captured_model_is_balanced_where_its_layers_are(
    devices: list[str], memory: Memory
) -> None:
    x, y = new_batch(0, "cpu")
    losses = [
        trained_once(x, y, num_stages=2, devices=where).item()
        for where in (devices, ["cpu", "cpu"])
    ]
    assert losses[0] == losses[1]
    assert memory.races == []


def trained_once(x: Tensor, y: Tensor, **options: Any) -> Tensor:
    torch.manual_seed(0)
    loss = F.mse_loss
    with penstock.Pipeline(Tied(), example_inputs=x, loss=loss, seed=1, **options) as pipe:
        assert sum(pipe.plan.partition) == 4
        return pipe.train_step(x, y)
