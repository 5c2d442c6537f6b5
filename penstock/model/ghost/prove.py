"""Is a model that was cut the model?  Both run on a small example, and are compared bit by bit.

    evaluation    the model as it is                           against    the chain of its stages
    training      the model as it is                           against    all blocks as one stage
                  all blocks as one stage, drawing by key      against    the chain of its stages

The chain runs here, stage after stage, without a schedule: forwards in order, then backwards.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from penstock.errors import CheckError, GlueError
from penstock.model.entries import Entry, faithful_copy, make_entry
from penstock.model.pytree import flatten, unflatten

from .cut import Cut
from .inputs import as_call
from .passes import Perform, plainly
from .record_model import Captured, as_it_was
from .values import EventKey, Header, ValueId

ROUNDING = 64
"""A difference below so many times the largest value's precision is one of summation order."""
_MOST_ROUNDING = 1e-2
_SMALL = 2
"""Samples of the example that are used."""

_NOISY = (
    "the model gives other bits each time, in evaluation mode too: it keeps state outside "
    "modules, or draws numbers that are not torch's"
)


@dataclass(frozen=True, slots=True)
class Side:
    """What one run gave: `kind name` of each tensor, and the tensor."""

    tensors: dict[str, Tensor | None]
    has_gradient: bool


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that is not the same on both sides, and by how much of its largest value."""

    name: str
    share: float
    precision: float = 0.0

    @property
    def is_rounding(self) -> bool:
        return self.share <= min(ROUNDING * self.precision, _MOST_ROUNDING)


def prove(captured: Captured, example_inputs: Any, partition: tuple[int, ...]) -> str:
    """Compare a cut model with the model as it is, on a small part of the example inputs.

    Gradients, buffers, modes and random states are as before afterwards; hooks run as often as the
    model does.

    Returns:
        What was found, in a sentence.

    Raises:
        CheckError: outputs, gradients or buffers differ by more than rounding (E8).
    """
    model, cut, whole = (
        captured.model,
        Cut(captured, partition),
        Cut(captured, (len(captured.calls),)),
    )
    call = as_call(_small(example_inputs))
    with _keeping_gradients(model):
        expected = _run(model, False, lambda: model(*_fresh(call)[0], **_fresh(call)[1]))
        found = _run(model, False, lambda: _chain(cut, call, _keyed))
        different = _differences(expected, found)
        if different:
            again = _run(model, False, lambda: model(*_fresh(call)[0], **_fresh(call)[1]))
            if _differences(expected, again):
                warnings.warn(_NOISY, stacklevel=5)
                return f"not checked: {_NOISY}"
        different += _differences(
            _run(model, True, lambda: model(*_fresh(call)[0], **_fresh(call)[1])),
            _run(model, True, lambda: _chain(whole, call, plainly)),
        )
        different += _differences(
            _run(model, True, lambda: _chain(whole, call, _keyed)),
            _run(model, True, lambda: _chain(cut, call, _keyed)),
        )
    _refuse(different, len(partition))
    gradients = "and gradients " if expected.has_gradient else ""
    how = "to the bit" if not different else f"but for rounding ({different[0].name})"
    return f"checked: outputs {gradients}over {len(partition)} stages are the model's, {how}"


def prove_alike(model: nn.Module, other: nn.Module, example_inputs: Any) -> None:
    """Compare two models of the same parameters, in evaluation and in training.

    Raises:
        CheckError: outputs, gradients or buffers differ, and by more than rounding.
    """
    call = as_call(_small(example_inputs))
    with _keeping_gradients(model):
        different = [
            (difference, "training" if training else "evaluation")
            for training in (False, True)
            for difference in _differences(
                _run(model, training, lambda: model(*_fresh(call)[0], **_fresh(call)[1])),
                _run(other, training, lambda: _running(other, call)),
            )
            if not difference.is_rounding
        ]
    if different:
        worst, mode = different[0]
        raise CheckError(
            f"the exported graph is not the model: in {mode}, {worst.name} differs by "
            f"{worst.share:.1e} of its largest value. What is exported lacks hooks, custom "
            "autograd functions and branches on values"
        )


def _running(other: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    args, kwargs = _fresh(call)
    try:
        return other(*args, **kwargs)
    except Exception as error:
        raise GlueError(
            f"what torch.export made of the model does not run: {str(error).splitlines()[0]}"
        ) from error


def _refuse(different: list[Difference], num_stages: int) -> None:
    worst = [difference for difference in different if not difference.is_rounding]
    if not worst:
        return
    outputs = [difference for difference in worst if difference.name.startswith("output")]
    also = "outputs are equal" if not outputs else f"{len(outputs)} outputs differ"
    raise CheckError(
        f"cut into {num_stages} stages, the model is not what it is whole: {worst[0].name} "
        f"differs by {worst[0].share:.1e} of its largest value, and {len(worst) - 1} others "
        f"differ; {also}. Name other blocks (blocks=), keep some "
        "together (together=), or try method='export'; check=False goes on regardless"
    )


def _small(example_inputs: Any) -> Any:
    """Take the first samples, if all tensors have the same number of them."""
    leaves, structure = flatten(example_inputs)
    if len({leaf.shape[:1] for leaf in leaves}) != 1 or not leaves[0].dim():
        return example_inputs
    return unflatten(structure, [leaf.detach()[:_SMALL] for leaf in leaves])


def _fresh(call: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Copy the inputs: a model may change them."""
    leaves, structure = flatten(call)
    fresh: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(
        structure, [leaf.detach().clone() for leaf in leaves]
    )
    return fresh


def _run(model: nn.Module, training: bool, forward: Callable[[], Any]) -> Side:
    """Run a forward and its backward in one mode; gather what they leave."""
    for parameter in model.parameters():
        parameter.grad = None
    with as_it_was(model, training=training), torch.enable_grad():
        output = forward()
        leaves = flatten(output.output if isinstance(output, _Chained) else output)[0]
        roots = [leaf for leaf in leaves if leaf.requires_grad]
        seeds = [_seed(root) for root in roots]
        if isinstance(output, _Chained):
            output.backward(roots, seeds)
        elif roots:
            torch.autograd.backward(roots, seeds)
        tensors: dict[str, Tensor | None] = {
            f"output {n}": leaf.detach() for n, leaf in enumerate(leaves)
        }
        for name, parameter in model.named_parameters(remove_duplicate=False):
            tensors[f"the gradient of {name!r}"] = parameter.grad
        for name, buffer in model.named_buffers():
            tensors[f"the buffer {name!r}"] = buffer.clone()
    return Side(tensors, bool(roots))


def _seed(tensor: Tensor) -> Tensor:
    """Give a gradient to start from in which no two values are alike."""
    steps = torch.linspace(-1, 1, max(tensor.numel(), 1), device=tensor.device)
    return steps[: tensor.numel()].reshape(tensor.shape).to(tensor.dtype)


def _differences(expected: Side, found: Side) -> list[Difference]:
    different = []
    for name, tensor in expected.tensors.items():
        other = found.tensors.get(name)
        if tensor is None or other is None:
            if tensor is not other:
                different.append(Difference(name, float("inf")))
        elif tensor.shape != other.shape:
            different.append(Difference(name, float("inf")))
        elif not torch.equal(tensor.nan_to_num(), other.nan_to_num()):
            precision = torch.finfo(tensor.dtype).eps if tensor.is_floating_point() else 0.0
            different.append(Difference(name, _share(tensor, other), precision))
    return different


def _share(tensor: Tensor, other: Tensor) -> float:
    if not tensor.is_floating_point():
        return float("inf")
    most = float((tensor.double() - other.double()).abs().max())
    return most / (float(tensor.double().abs().max()) or 1.0)


@contextmanager
def _keeping_gradients(model: nn.Module) -> Iterator[None]:
    before = [(parameter, parameter.grad) for parameter in model.parameters()]
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


# -- the chain --------------------------------------------------------------------------------


@dataclass(slots=True)
class _Link:
    """A value on its way from stage to stage: what left, and what it is there."""

    source: int
    sent: Tensor
    entry: Entry


class _Chained:
    """A forward of all stages, one after the other, and the backward that belongs to it."""

    def __init__(self) -> None:
        self.links: dict[int, list[_Link]] = {}
        self.output: Any = None

    def backward(self, roots: list[Tensor], seeds: list[Tensor]) -> None:
        """Run the backward of each stage, the last one first."""
        pairs = {max(self.links): list(zip(roots, seeds, strict=True))}
        for stage in sorted(self.links, reverse=True):
            of_stage = pairs.get(stage, [])
            if of_stage:
                torch.autograd.backward(
                    [root for root, _ in of_stage], [seed for _, seed in of_stage]
                )
            for link in self.links[stage]:
                if link.entry.gradient is not None:
                    pairs.setdefault(link.source, []).append((link.sent, link.entry.gradient))


def _chain(cut: Cut, call: tuple[tuple[Any, ...], dict[str, Any]], perform: Perform) -> _Chained:
    chained, header = _Chained(), Header()
    waiting: dict[int, list[tuple[int, ValueId, Tensor]]] = {}
    for stage in range(cut.num_stages):
        links, received = [], {}
        for source, value, tensor in waiting.pop(stage, []):
            link = _Link(source, tensor, make_entry(tensor, tensor.requires_grad))
            links.append(link)
            received[value] = faithful_copy(link.entry.tensor)
        chained.links[stage] = links
        args, kwargs = _fresh(call)
        replay = cut.replay(stage, received, header, perform)
        chained.output = cut.run(replay, args, kwargs)
        header = replay.header
        for target, values in cut.sent_on(replay, stage).items():
            waiting.setdefault(target, []).extend((stage, v, t) for v, t in values.items())
    return chained


def _keyed(key: EventKey, function: Callable[[], Any]) -> Any:
    """Draw the same random numbers for an operation wherever it is cut."""
    torch.manual_seed(crc32(repr(tuple(key)).encode()))
    return function()
