"""The backwards that are compared: whole, and three ways to have it in two parts."""

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.model.entries import make_entry
from penstock.runtime.stage.tape import Tape


class Taken(NamedTuple):
    """Seconds of one micro-batch."""

    forward_s: float
    input_s: float
    weight_s: float

    @property
    def total_s(self) -> float:
        """The seconds of both parts of the backward."""
        return self.input_s + self.weight_s


Between = Callable[[], None]
"""Is called between the two parts."""
Way = Callable[..., Taken]


def _nothing() -> None:
    """Look at nothing."""


def _timed(
    forward: Callable[[], Any],
    backward_input: Callable[[Any], Any],
    backward_weight: Callable[[Any], None],
    between: Between,
) -> Taken:
    start_s = time.perf_counter()
    made = forward()
    forward_s = time.perf_counter() - start_s
    start_s = time.perf_counter()
    made = backward_input(made)
    input_s = time.perf_counter() - start_s
    between()
    start_s = time.perf_counter()
    backward_weight(made)
    return Taken(forward_s, input_s, time.perf_counter() - start_s)


def _tape(model: nn.Module, x: Tensor) -> Tape:
    tape = Tape(0, {}, graph_dropped=False)
    tape.entries[0] = [make_entry(x, wants_grad=True)]
    tape.output = [model(tape.entry_tensors[0])]
    return tape


def whole(model: nn.Module, x: Tensor, gradient: Tensor, between: Between = _nothing) -> Taken:
    """Run autograd once."""

    def backward(tape: Tape) -> None:
        tape.backward(tape.output, [gradient])

    return _timed(lambda: _tape(model, x), backward, lambda _: None, between)


def penstock(model: nn.Module, x: Tensor, gradient: Tensor, between: Between = _nothing) -> Taken:
    """Cut the graph, as BackwardInput and BackwardWeight do."""

    def backward_input(tape: Tape) -> Tape:
        tape.divide(tape.output)
        tape.backward(tape.output, [gradient])
        tape.drop_graph()
        return tape

    return _timed(lambda: _tape(model, x), backward_input, Tape.backward_weight, between)


def torch_parts(
    model: nn.Module, x: Tensor, gradient: Tensor, between: Between = _nothing
) -> Taken:
    """Run what torch.distributed.pipelining runs."""

    def forward() -> tuple[Tensor, Tensor]:
        entry = x.detach().requires_grad_()
        return entry, model(entry)

    def backward_input(made: tuple[Tensor, Tensor]) -> Any:
        entry, result = made
        return stage_backward_input([result], [gradient], [entry], model.parameters())[1]

    def backward_weight(groups: Any) -> None:
        stage_backward_weight(model.parameters(), groups)

    return _timed(forward, backward_input, backward_weight, between)


def twice(model: nn.Module, x: Tensor, gradient: Tensor, between: Between = _nothing) -> Taken:
    """Call autograd for the input, keep the graph, and call it again for the weights."""

    def forward() -> tuple[Tensor, Tensor]:
        entry = x.detach().requires_grad_()
        return entry, model(entry)

    def backward_input(made: tuple[Tensor, Tensor]) -> Tensor:
        entry, result = made
        torch.autograd.grad([result], [entry], [gradient], retain_graph=True)
        return result

    def backward_weight(result: Tensor) -> None:
        torch.autograd.backward([result], [gradient], inputs=list(model.parameters()))

    return _timed(forward, backward_input, backward_weight, between)


WAYS: dict[str, Way] = {
    "whole": whole,
    "Penstock": penstock,
    "torch stage_backward_*": torch_parts,
    "autograd twice": twice,
}


class _Alive(TorchDispatchMode):
    """Knows which storages that operators made are still there."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            if isinstance(each, Tensor):
                self.made.append(weakref.ref(each.untyped_storage()))
        return found


def bytes_between(way: Way, model: nn.Module, x: Tensor, gradient: Tensor) -> int:
    """Count the bytes that are alive between the two parts, and were not before the forward."""
    counted = 0
    before = [x, gradient, *model.parameters(), *model.buffers()]
    known = _addresses([*before, *(p.grad for p in model.parameters() if p.grad is not None)])

    def count() -> None:
        nonlocal counted
        alive = {s.data_ptr(): s.nbytes() for ref in mode.made if (s := ref()) is not None}
        counted = sum(size for address, size in alive.items() if address not in known)

    mode = _Alive()
    with mode:
        way(model, x, gradient, count)
    return counted


def _addresses(tensors: Sequence[Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
