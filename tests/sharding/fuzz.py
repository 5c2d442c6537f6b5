"""Run random legal plans of a module beside the module itself: they have to give the same."""

import random
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from penstock import Mesh
from penstock.costs.counting.count import record_graph
from penstock.costs.counting.graph import Graph
from penstock.model.layer_list import as_layers
from penstock.model.pytree import flatten, tree_map
from penstock.runtime.shards.at_rest import keep_slices
from penstock.runtime.shards.convert import convert
from penstock.runtime.shards.divided import DividedLayer
from penstock.runtime.shards.run import LayerRun, ShardedTensor
from penstock.runtime.shards.sizes import slice_here
from penstock.sharding.costs import Costs
from penstock.sharding.layouts import I, Layout, R, S, State
from penstock.sharding.letters import Seen
from penstock.sharding.plan import LayerSharding, PlannedCall
from penstock.sharding.program import Solved, priced
from penstock.sharding.routed import routed_calls
from penstock.sharding.rules import Choice, divisions, fits, together

Difference = tuple[str, int, str, float]
"""Which case, which plan, what of it, and how far off."""


@dataclass(frozen=True)
class Case:
    """A module, the shape of its input, and other shapes that its plans have to work for."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    others: tuple[tuple[int, ...], ...] = ()
    num_words: int = 0
    """Where it is given words, how many there are."""

    def inputs(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Draw an input, of words or of numbers."""
        if self.num_words:
            return torch.randint(0, self.num_words, tuple(shape))
        return torch.randn(tuple(shape), dtype=dtype, requires_grad=True)


class CheckedRun(LayerRun):
    """Sees after each call that what this device holds is what the layout says.

    Wholes have the shapes that the function gives without any division.
    """

    def call(self, func: Any, args: Any, kwargs: Any, tensors: Mapping[int, Tensor]) -> Any:
        wholes = {
            key: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for key, tensor in tensors.items()
        }
        given = tree_map(lambda tensor: wholes[id(tensor)], (args, kwargs))
        result = super().call(func, args, kwargs, tensors)
        if isinstance(func, FunctionType) and func.__module__.startswith("penstock"):
            return result  # an opaque module
        for found, wanted in zip(flatten(result)[0], _whole(func, *given), strict=True):
            assert isinstance(found, ShardedTensor)
            assert found.whole_shape == wanted, (func, found, wanted)
            here = slice_here(wanted, found.held, self._axes).lengths
            assert tuple(found.local.shape) == here, (func, found, here)
        return result


def _whole(func: Any, args: Any, kwargs: Any) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in flatten(func(*args, **kwargs))[0]]


def random_plan(graph: Graph, mesh: tuple[int, ...], seed: int) -> LayerSharding:
    """Choose one of all choices of each call, mostly one that cuts, and any states at rest."""
    draw = random.Random(seed)
    calls = routed_calls(graph, 0)

    def one_of(seen: Seen) -> tuple[Choice, ...]:
        every = together(seen, divisions(seen, mesh), mesh)
        wanted = [draw.random() < 0.8 for _ in mesh]
        cuts = [
            own for own in every if all(c.cut or not w for c, w in zip(own, wanted, strict=True))
        ]
        return draw.choice(cuts or every)

    chosen = [PlannedCall(call.function, one_of(Seen.of(graph, call))) for call in calls]
    at_rest: dict[int, Layout] = {}
    for n in dict.fromkeys(n for call in calls for n in call.takes):
        spec = graph.tensors[n]
        if spec.name and spec.wants_gradient:
            states: list[State] = [I, R, *map(S, range(len(spec.shape)))]
            layout = tuple(draw.choice(states) for _ in mesh)
            at_rest[n] = layout if fits(spec.shape, layout, mesh) else (I,) * len(mesh)
    return priced(graph, "0", Costs.usual(mesh), calls, Solved(chosen, at_rest, 0.0, 0.0), {})


def differences(
    mesh: Mesh, case: Case, seeds: Sequence[int], dtype: torch.dtype
) -> tuple[list[Difference], set[str]]:
    """Run plans drawn from these seeds; return all that is off, and what was cut."""
    torch.manual_seed(7)
    whole = case.make().to(dtype)
    graph = record_graph(as_layers([whole]), case.inputs(case.shape, dtype))
    axes = mesh.shard_axes
    found: list[Difference] = []
    cut: set[str] = set()
    for seed in seeds:
        plan = random_plan(graph, tuple(axis.size for axis in axes), seed)
        cut |= {c.function for c in plan.calls if any(choice.cut for choice in c.choices)}
        module = deepcopy(whole)
        divided = DividedLayer(0, module, plan, axes)
        keep_slices(divided.cut)
        alone = deepcopy(whole)
        for number, shape in enumerate((case.shape, *case.others)):
            torch.manual_seed(100 * seed + number)
            inputs = case.inputs(shape, dtype)
            wanted = _ran(inputs, alone)
            got = _ran(inputs, module, divided)
            assert wanted.keys() == got.keys(), (wanted.keys(), got.keys())
            found += [
                (case.name, seed, f"{what} of {shape}", off)
                for what, off in _off(wanted, got).items()
            ]
    return found, cut


def _ran(
    inputs: Tensor, module: nn.Module, divided: DividedLayer | None = None
) -> dict[str, Tensor]:
    inputs = inputs.detach().requires_grad_(inputs.requires_grad)
    torch.manual_seed(3)
    with patch("penstock.runtime.shards.divided.LayerRun", CheckedRun):
        output = module(inputs) if divided is None else divided.call(partial(module, inputs), {})
    found = {"output": output.detach()}
    torch.manual_seed(4)
    output.backward(torch.randn(output.shape, dtype=output.dtype))
    if inputs.grad is not None:
        found["input"] = inputs.grad
    for name, weight in module.named_parameters():
        if weight.grad is not None:
            found[name] = weight.grad if divided is None else _whole_gradient(weight, divided)
            weight.grad = None
    found.update({name: buffer.clone() for name, buffer in module.named_buffers()})
    return found


def _whole_gradient(weight: Tensor, divided: DividedLayer) -> Tensor:
    gradient = weight.grad
    assert gradient is not None
    for axis, own in zip(divided.axes, divided.partial, strict=True):
        if any(weight is one for one in own):
            axis.all_reduce(gradient, "for a gradient")
    cut = divided.cut.get(weight)
    return gradient if cut is None else convert(gradient, cut.layout, cut.whole, cut.axes)


def _off(wanted: dict[str, Tensor], got: dict[str, Tensor]) -> dict[str, float]:
    """Return how far each tensor is off, beside the largest number of all: some should be nothing,
    as the gradient of a bias before a softmax.
    """
    largest = max(float(own.abs().max()) for own in wanted.values() if own.numel())
    return {
        name: float((got[name] - own).abs().max()) / largest
        if got[name].shape == own.shape
        else float("inf")
        for name, own in wanted.items()
        if own.numel()
    }
