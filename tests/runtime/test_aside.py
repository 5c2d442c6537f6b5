"""A value that one stage hands another aside is refused; what only looks like one is not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import Layer
from penstock.errors import PeerError, StateError
from penstock.types import Recompute, Transport
from tests.distributed.call import call

SEEN: dict[str, Any] = {}
X, Y = torch.linspace(-1, 1, 32).reshape(8, 4), torch.zeros(8, 4)
Model = list[nn.Module]
Loss = Callable[[Tensor, Tensor], Tensor]


class Box:
    """An object that layers share."""

    def __init__(self) -> None:
        self.mask: Tensor | None = None
        self.table: Tensor | None = None
        self.count, self.width, self.log = 0, 4, []  # type: ignore[var-annotated]

    def put(self, mask: Tensor) -> None:
        self.mask = mask


class Does(nn.Module):
    """Does something beside its product: `does(self, x)` returns what multiplies it."""

    def __init__(self, does: Callable[["Does", Tensor], Any], box: Any = None) -> None:
        super().__init__()
        self.linear, self.does, self.box = nn.Linear(4, 4), does, box
        self.mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        factor = self.does(self, x)
        return self.linear(x) * (1 if factor is None else factor)


class Masks(nn.Module):
    """Keeps a mask of what it was given, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mask, self.calls = nn.Linear(4, 4), torch.ones(4), 0
        self.register_buffer("level", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.mask = (x > 0).float()
        self.calls += 1
        self.get_buffer("level").fill_(float(x.detach().sum()))
        return self.linear(x)


def error(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def between(first: nn.Module, last: nn.Module) -> Model:
    return [first, nn.Tanh(), last]


def a_dict() -> tuple[Model, Loss]:
    box: dict[str, Tensor] = {}
    put = Does(lambda own, x: own.box.update(mask=x > 0), box)
    return between(put, Does(lambda own, x: own.box["mask"], box)), error


def a_global() -> tuple[Model, Loss]:
    def put(own: Does, x: Tensor) -> None:
        SEEN["mask"] = x.detach() > 0

    return between(Does(put), Does(lambda own, x: SEEN.get("mask"))), error


def an_object() -> tuple[Model, Loss]:
    box = Box()
    put = Does(lambda own, x: own.box.put(x > 0), box)
    return between(put, Does(lambda own, x: own.box.mask, box)), error


def in_place() -> tuple[Model, Loss]:
    box = Box()
    box.mask = torch.ones(4)

    def fill(own: Does, x: Tensor) -> None:
        own.box.mask.copy_(x[0] > 0)

    put = Does(fill, box)
    return between(put, Does(lambda own, x: own.box.mask.clone(), box)), error


def a_list() -> tuple[Model, Loss]:
    box: list[Tensor] = []
    put = Does(lambda own, x: own.box.append(x > 0), box)
    return between(put, Does(lambda own, x: own.box[-1], box)), error


def a_counter() -> tuple[Model, Loss]:
    box = Box()

    def count(own: Does, x: Tensor) -> int:
        own.box.count += 1
        return int(own.box.count)

    return between(Does(count, box), Does(count, box)), error


def a_variable() -> tuple[Model, Loss]:
    count = 0

    def counted(own: Does, x: Tensor) -> int:
        nonlocal count
        count += 1
        return count

    return between(Does(counted), Does(counted)), error


def a_hook() -> tuple[Model, Loss]:
    kept: dict[str, Tensor] = {}
    layers = between(nn.Linear(4, 4), nn.Linear(4, 4))
    layers[0].register_forward_hook(lambda module, given, out: kept.update(mask=out > 0))
    layers[2].register_forward_pre_hook(lambda module, given: (given[0] * kept["mask"],))
    return layers, error


def another_layer() -> tuple[Model, Loss]:
    first = Masks()
    return between(first, Does(lambda own, x: own.box[0].mask, [first])), error


def the_loss() -> tuple[Model, Loss]:
    layers = between(Masks(), nn.Linear(4, 4))
    return layers, lambda out, target: ((out - target).square() * layers[0].mask).mean()


def a_buffer_in_the_loss() -> tuple[Model, Loss]:
    layers = between(Masks(), nn.Linear(4, 4))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return error(output, target) * layers[0].get_buffer("level").exp()

    return layers, loss


REFUSED = (
    (a_dict, r"box\['mask'\]"),
    (a_global, r"SEEN\['mask'\]"),
    (an_object, "'mask'"),
    (in_place, "'mask'"),
    (a_list, "box"),
    (a_counter, "'count'"),
    (a_variable, "'count'.*closure"),
    (a_hook, r"kept\['mask'\]"),
    (another_layer, "'mask'"),
    (the_loss, "'mask'"),
    (a_buffer_in_the_loss, "'level'"),
)


def piped(model: Model, loss: Loss, **options: Any) -> penstock.Pipeline:
    usual: dict[str, Any] = {"num_stages": 2, "num_microbatches": 4, "threads_per_stage": 1}
    return penstock.Pipeline(model, loss=loss, **usual | options)


@pytest.mark.parametrize("transport", [Transport.THREADS, Transport.LOOPBACK])
@pytest.mark.parametrize(("made", "where"), REFUSED)
def test_a_value_handed_on_aside_is_refused_with_both_names(
    made: Callable[[], tuple[Model, Loss]], where: str, transport: Transport
) -> None:
    reader = "the loss" if "loss" in made.__name__ else "layer '"
    pattern = rf"{where}(?s:.)*on stage 0 and read by {reader}(?s:.)*on stage 1.*penstock.Layer"
    cut: dict[str, Any] = {"partition": [2, 1], "num_stages": None, "transport": transport}
    if transport is Transport.THREADS:  # a recompute may see the change before the reader reads
        cut["recompute"] = Recompute.NEVER
    with piped(*made(), **cut) as pipe, pytest.raises(StateError, match=pattern):
        for _ in range(3):  # threads may hide a change from one look
            pipe.train_step(X, Y)
    if "loss" not in made.__name__:
        with piped(*made(), **cut) as pipe, pytest.raises(StateError, match=pattern):
            for _ in range(3):
                pipe.eval_step(X)


@pytest.mark.parametrize(("made", "where"), REFUSED)
@pytest.mark.parametrize("options", [{"num_stages": 1}, {"num_microbatches": 1}])
def test_one_stage_and_one_micro_batch_are_as_the_model_is(
    made: Callable[[], tuple[Model, Loss]], where: str, options: dict[str, Any]
) -> None:
    del where
    with piped(*made(), **options, recompute=Recompute.NEVER) as pipe:
        pipe.train_step(X, Y)


def lazily(own: Does, x: Tensor) -> Tensor:
    if own.box.table is None:
        own.box.table = torch.ones(own.box.width)
    own.box.log.append(tuple(x.shape))
    found: Tensor = own.box.table
    return found


def anew(own: Does, x: Tensor) -> Tensor:
    own.box["table"] = torch.ones(4)
    found: Tensor = own.box["table"]
    return found


def a_cache() -> tuple[Model, Loss]:
    box = Box()
    return between(Does(lazily, box), Does(lazily, box)), error


def equal_values() -> tuple[Model, Loss]:
    box: dict[str, Tensor] = {}
    return between(Does(anew, box), Does(anew, box)), error


def a_config() -> tuple[Model, Loss]:
    box = Box()
    width = lambda own, x: own.box.width  # noqa: E731 - as short as it is
    return between(Does(width, box), Does(width, box)), error


def a_log_of_hooks() -> tuple[Model, Loss]:
    kept: dict[int, Tensor] = {}
    layers = between(nn.Linear(4, 4), nn.Linear(4, 4))

    def hook(number: int) -> Callable[..., None]:
        def keep(module: nn.Module, given: Any, out: Tensor) -> None:
            kept[number] = out.detach()

        return keep

    for number, layer in enumerate(layers):
        layer.register_forward_hook(hook(number))
    return layers, error


def own_log() -> tuple[Model, Loss]:
    log: list[float] = []
    return between(Does(lambda own, x: own.box.append(1.0), log), nn.Linear(4, 4)), error


def a_shared_module() -> tuple[Model, Loss]:
    shared = nn.Dropout(0.0)
    return [nn.Linear(4, 4), shared, nn.Linear(4, 4), shared], error


def a_loss_that_reads_nothing() -> tuple[Model, Loss]:
    layers = between(Masks(), Masks())

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return error(output, target) * len(layers)

    return layers, loss


HARMLESS = (
    a_cache,
    equal_values,
    a_config,
    a_log_of_hooks,
    own_log,
    a_shared_module,
    a_loss_that_reads_nothing,
)


@pytest.mark.parametrize("made", HARMLESS)
def test_what_does_not_change_or_is_not_read_elsewhere_is_not_refused(
    made: Callable[[], tuple[Model, Loss]],
) -> None:
    with piped(*made()) as pipe:
        for _ in range(2):
            pipe.train_step(X, Y)
            pipe.eval_step(X)


def test_what_the_caller_changes_between_steps_is_not_refused() -> None:
    box = Box()
    scaled = lambda own, x: own.box.width  # noqa: E731 - as short as it is
    with piped(between(Does(scaled, box), Does(scaled, box)), error) as pipe:
        for width in (1, 2, 3):
            box.width = width
            pipe.train_step(X, Y)


def test_the_same_value_by_name_is_right() -> None:
    class Named(Masks):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), self.mask

    class Uses(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return x * mask

    named = Named()
    layers = [Layer(named, outputs=("x", "mask")), Layer(Uses(), inputs=("x", "mask"))]
    with piped(layers, error) as pipe:  # type: ignore[arg-type]
        found = pipe.train_step(X, Y)
    expected = error(named.linear(X) * (X > 0).float(), Y)
    torch.testing.assert_close(found, expected)


def test_watching_ends_after_the_first_steps() -> None:
    with piped(*a_cache()) as pipe:
        watched = []
        for _ in range(5):
            pipe.train_step(X, Y)
            watched.append(pipe._engine.aside._left[True])
    assert watched == [2, 1, 0, 0, 0]


def refused_on(mesh: penstock.Mesh) -> list[str]:
    """Say what two steps of one micro-batch raise where a layer reads what another one keeps."""
    first = Masks()
    last = Does(lambda own, x: own.box[0].mask, [first])
    pipe = piped(between(first, last), error, mesh=mesh, num_microbatches=1)
    try:
        for _ in range(2):
            pipe.train_step(X[:4] if pipe.step else X[4:], Y[:4])
    except (StateError, PeerError) as caught:
        return [type(caught).__name__, str(caught)]
    return []


def test_processes_refuse_it_too(tmp_path: Path) -> None:
    (mine, said), (theirs, told) = call(refused_on, (2, 1), tmp_path, ends_well=False)
    assert (mine, theirs) == ("StateError", "PeerError")
    assert "'mask'" in said and "StateError" in told
