"""Compare the stages of a model with the unsplit model, bit by bit, on few samples.

    training      forward and backward     outputs, gradients, buffers
    evaluation    forward                  outputs, buffers

The stages run one after the other without a schedule: forwards in order, then backwards.  So they
draw random numbers in the order of the unsplit model.

GPU kernels may add in another order each time, which changes a gradient near zero completely.  So
a tensor that differs between two runs of the model itself is compared relative to the largest
value of all gradients (or outputs); every other tensor, relative to its own largest value.
"""

import random
import warnings
from collections.abc import Callable, Collection
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.errors import CheckError, RouteError
from penstock.model.copies import faithful_copy
from penstock.model.entries import Entry, make_entry
from penstock.model.pytree import flatten, tree_map
from penstock.torch_private import has_accumulation_hooks
from penstock.trace.units import count_text

from .captured import Captured
from .events import SealedHeader, ValueId
from .inputs import Call, as_call, first_samples
from .outer_state import as_it_was
from .source import captured_layers
from .stages import CutModel

ROUNDING = 64
"""A difference below this many times the precision of the largest value is rounding."""
_MOST_ROUNDING = 1e-2
"""A larger share is no rounding, in any precision."""
_MOST_STAGES = 8
"""The number of stages that are compared, if the model has as many blocks."""
_FEW = (1, 2)
"""Numbers of samples that are tried before the whole example."""
_NOISY = (
    "the model gives other bits each time, in evaluation mode too: it keeps state outside "
    "modules, or draws numbers that are not torch's"
)
_GRADIENT, _OUTPUT = "the gradient of ", "output "
Forward = Callable[..., Any]
Tensors = dict[tuple[str, str], Tensor | None]
"""The tensors after a run, by (mode, name): outputs, gradients and buffers."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor that differs, and the difference as a share `of` a largest value."""

    name: str
    share: float = float("inf")
    precision: float = 0.0
    of: str = "its largest value"


def prove_where_possible(captured: Captured, example_inputs: Any) -> str:
    """Compare the stages with the unsplit model, if it has values and more than one block.

    Return the result in a sentence, or raise as `prove` does.
    """
    parameters = list(captured.model.parameters())
    reason = None
    if any(tensor.is_meta for tensor in (*parameters, *captured.model.buffers())):
        reason = "the model has no values yet"
    elif len(captured.calls) < 2:
        reason = "there is one block, and so no cut"
    elif any(has_accumulation_hooks(p) for p in parameters):
        reason = "hooks on its gradients would run"
    elif dist.is_available() and dist.is_initialized() and dist.get_rank():
        reason = "rank 0 does"
    if reason is not None:
        return f"not checked: {reason}"
    # Split the calls into a few stages of about the same number.
    spans = captured_layers(captured).spans
    num_stages = min(_MOST_STAGES, len(spans))
    starts = [spans[stage * len(spans) // num_stages][0] for stage in range(num_stages)]
    ends = [*starts[1:], len(captured.calls)]
    partition = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return prove(captured, example_inputs, partition)


def prove(captured: Captured, example_inputs: Any, partition: tuple[int, ...]) -> str:
    """Compare the stages of a partition with the unsplit model, on a part of the example inputs.

    Gradients, buffers, modes and random states are restored; hooks run with each run of the model.
    Return the result in a sentence; CheckError if more than rounding differs (E8).
    """
    # 1. Run the unsplit model, then the stages, on as few samples as show something.
    model = captured.model
    chain = partial(_Chained, CutModel(captured, partition))
    with ExitStack() as after:
        for parameter in model.parameters():
            after.callback(setattr, parameter, "grad", parameter.grad)
        call, expected = _reference(model, example_inputs)
        try:
            found = _in_both_modes(model, call, chain)
        except RouteError:  # fewer samples may take another path, as in a loop over samples
            call = as_call(example_inputs)
            expected, found = (_in_both_modes(model, call, run) for run in (model, chain))
        # 2. Compare; what differs between two runs of the model itself counts less.
        different = _differences(expected, found)
        if _worse_than_rounding(different):
            one, other = (_run(model, call, model, "evaluation") for _ in range(2))
            noise = _differences(one, other, {name for _, name in one})
            if _worse_than_rounding(noise):
                warnings.warn(_NOISY, stacklevel=5)
                return f"not checked: {_NOISY}"
            different = _differences(expected, found, {noisy.name for noisy in noise})
    _refuse(different, len(partition))
    has_gradient = any(t is not None for (_, name), t in expected.items() if _GRADIENT in name)
    gradients = "and gradients " if has_gradient else ""
    how = "to the bit" if not different else f"but for rounding ({different[0].name})"
    stages = count_text(len(partition), "stage")
    return f"checked: outputs {gradients}over {stages} are the model's, {how}"


def _reference(model: nn.Module, example_inputs: Any) -> tuple[Call, Tensors]:
    """Run the unsplit model in training and in evaluation, on as few samples as possible.

    A model that refuses a few samples, or has zero gradients for one, gets more.
    """
    for count in _FEW:
        few = first_samples(example_inputs, count)
        if few is None:
            break
        try:
            with warnings.catch_warnings():  # of a variance of one value, say
                warnings.simplefilter("ignore")
                found = _in_both_modes(model, as_call(few), model)
        except Exception:  # a model may raise anything for a batch that is too small
            continue
        if count > 1 or all(_is_telling(t) for (_, n), t in found.items() if _GRADIENT in n):
            return as_call(few), found
    call = as_call(example_inputs)
    return call, _in_both_modes(model, call, model)


def _is_telling(gradient: Tensor | None) -> bool:
    """Tell whether a gradient could show a fault: it is finite, and not zero everywhere.

    A contrastive loss of one sample is constant, and so is a BatchNorm of one value.
    """
    if gradient is None or not gradient.numel():
        return True
    return 0 < float(gradient.abs().max()) < float("inf")


def _in_both_modes(model: nn.Module, call: Call, forward: Forward) -> Tensors:
    trained = _run(model, call, forward, "training")
    return {**trained, **_run(model, call, forward, "evaluation", backward=False)}


def _worse_than_rounding(different: list[Difference]) -> list[Difference]:
    return [d for d in different if d.share > min(ROUNDING * d.precision, _MOST_ROUNDING)]


def _refuse(different: list[Difference], num_stages: int) -> None:
    worst = _worse_than_rounding(different)
    if not worst:
        return
    outputs = [difference for difference in worst if difference.name.startswith(_OUTPUT)]
    also = "outputs are equal" if not outputs else f"{len(outputs)} outputs differ"
    raise CheckError(
        f"cut into {num_stages} stages, the model is not what it is whole: {worst[0].name} "
        f"differs by {worst[0].share:.1e} of {worst[0].of}, and {len(worst) - 1} others "
        f"differ; {also}. Name other blocks (blocks=), or "
        "keep some together (together=); check=False goes on regardless"
    )


def _run(
    model: nn.Module, call: Call, forward: Forward, mode: str, *, backward: bool = True
) -> Tensors:
    """Run a forward, and its backward, in one mode; return the tensors after it."""
    for parameter in model.parameters():
        parameter.grad = None
    args, kwargs = _fresh(call)
    found: Tensors = {}
    training = mode == "training"
    with as_it_was(model, training=training), torch.set_grad_enabled(backward):
        output = forward(*args, **kwargs)
        leaves = flatten(output.output if isinstance(output, _Chained) else output)[0]
        roots = [leaf for leaf in leaves if leaf.requires_grad and backward]
        seeds = [_seed(root) for root in roots]
        if isinstance(output, _Chained):
            output.backward(roots, seeds)
        elif roots:
            torch.autograd.backward(roots, seeds)
        found.update(((mode, f"{_OUTPUT}{n}"), leaf.detach()) for n, leaf in enumerate(leaves))
        for name, parameter in model.named_parameters(remove_duplicate=False):
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                gradient = gradient.to_dense()
            found[mode, f"{_GRADIENT}{name!r}"] = gradient
        for name, buffer in model.named_buffers():
            found[mode, f"the buffer {name!r}"] = buffer.clone()
    return found


def _fresh(call: Call) -> Call:
    """Copy the inputs: a model may change them."""
    fresh: Call = tree_map(lambda leaf: leaf.detach().clone(), call)
    return fresh


def _seed(tensor: Tensor) -> Tensor:
    """Return a gradient for an output, with all values different."""
    steps = torch.linspace(-1, 1, max(tensor.numel(), 1), device=tensor.device)
    return steps[: tensor.numel()].reshape(tensor.shape).to(tensor.dtype)


def _differences(
    expected: Tensors, found: Tensors, noisy: Collection[str] = ()
) -> list[Difference]:
    """Compare all tensors, the noisy ones relative to the largest value of their kind."""
    largest: dict[tuple[str, str], float] = {}  # the largest finite values
    for (mode, name), tensor in expected.items() if noisy else ():
        at = mode, _kind(name)
        largest.setdefault(at, 0.0)
        if tensor is not None and tensor.is_floating_point():
            values = tensor[tensor.isfinite()].double().abs()
            largest[at] = max(largest[at], float(values.max()) if values.numel() else 0.0)
    both = (
        _difference(
            *(name, tensor, found.get((mode, name))),
            of_kind=largest[mode, _kind(name)] if name in noisy else None,
        )
        for (mode, name), tensor in expected.items()
    )
    return [difference for difference in both if difference is not None]


def _difference(
    name: str, tensor: Tensor | None, other: Tensor | None, of_kind: float | None
) -> Difference | None:
    if tensor is None or other is None or tensor.shape != other.shape:
        return None if tensor is other else Difference(name)
    if torch.equal(tensor, other):
        return None
    has_same_nan = torch.equal(tensor.isnan(), other.isnan())  # a NaN equals nothing
    if has_same_nan and torch.equal(tensor.nan_to_num(), other.nan_to_num()):
        return None
    if not tensor.is_floating_point():
        return Difference(name)
    most = float((tensor.double() - other.double()).abs().max())
    largest = float(tensor.double().abs().max()) if of_kind is None else of_kind
    of = "its largest value" if of_kind is None else "the largest value of its kind"
    return Difference(name, most / (largest or 1.0), torch.finfo(tensor.dtype).eps, of)


def _kind(name: str) -> str:
    """Return the kind of a tensor: gradient or output; each buffer is its own kind."""
    return next((kind for kind in (_GRADIENT, _OUTPUT) if name.startswith(kind)), name)


class _Chained:
    """A forward of all stages, one after the other, and its backward.

    `links` has the inputs of each stage: (source stage, tensor sent, entry here).
    """

    def __init__(self, cut: CutModel, /, *args: Any, **kwargs: Any) -> None:
        self.links: list[list[tuple[int, Tensor, Entry]]] = []
        told: SealedHeader | None = None
        drawn = random.getstate(), numpy.random.get_state(legacy=False)
        waiting: dict[int, list[tuple[int, ValueId, Tensor]]] = {}
        for stage in range(cut.num_stages):
            links, received = [], {}
            for source, value, tensor in waiting.pop(stage, []):
                wants_gradient = tensor.requires_grad and torch.is_grad_enabled()
                entry = make_entry(tensor, wants_gradient)
                links.append((source, tensor, entry))
                received[value] = faithful_copy(entry.tensor)
            self.links.append(links)
            if cut.captured.draws_between:  # every stage draws the same numbers
                random.setstate(drawn[0])
                numpy.random.set_state(drawn[1])
            ran = cut.run_stage(stage, _fresh((args, kwargs)), received, told)
            self.output, told = ran.output, ran.told
            for target, values in ran.sent.items():
                waiting.setdefault(target, []).extend((stage, v, t) for v, t in values.items())

    def backward(self, roots: list[Tensor], seeds: list[Tensor]) -> None:
        pairs = {len(self.links) - 1: list(zip(roots, seeds, strict=True))}
        for stage in reversed(range(len(self.links))):
            if of_stage := pairs.get(stage):
                outputs, gradients = zip(*of_stage, strict=True)
                torch.autograd.backward(outputs, gradients)
            for source, sent, entry in self.links[stage]:
                if entry.gradient is not None:
                    pairs.setdefault(source, []).append((sent, entry.gradient))
