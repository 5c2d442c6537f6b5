"""Compute a loss, or other code after a layer, from an output that the layer leaves in slices.

    last layer ──S(2)──► flatten ──S(1)──► cross_entropy ──I──► loss, whole on each device
                         target  ──R─────┘

Such code is one more layer.  Its calls are recorded and divided at its first micro-batch, since
targets are not known before.  A function without a rule takes whole values.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from inspect import getclosurevars, isfunction
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.costs.counting.count import record_graph
from penstock.model.capture.later import OF_THE_GRAPH, Code, form, stand_in_of
from penstock.model.entries import layout_on, whole_size
from penstock.model.kept import is_of_user, kept_by, put_back
from penstock.model.layer_list import as_layers
from penstock.model.layers import Layers
from penstock.model.pytree import flatten, unflatten
from penstock.sharding.layouts import I, Layout, R, S
from penstock.sharding.plan import LayerSharding
from penstock.sharding.routed import why_whole

from .divided import NO_LAYER, Axes, DividedLayer, Noted, called_alike
from .run import OtherPathError

Layouts = tuple[Layout | None, ...]
"""The layout of each tensor that code takes; None for a whole tensor."""


class _CodeLayer(nn.Module):
    """A function as a layer, whose input is its arguments; it is only recorded.

    Its attributes are restored afterwards: they hold what the function may write into.
    """

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function, self.owner = function, getattr(function, "__self__", None)
        self.outside = _outside(function)

    def forward(self, given: tuple[Any, ...]) -> Any:
        with _Recorded():
            return self.function(*given)


def _outside(function: Any) -> list[Any]:
    """Return what a function, and functions that it calls, reach by closures and global names."""
    found = [function]
    for own in found:  # it grows
        if isfunction(own) and is_of_user(own):
            with suppress(ValueError):  # a variable of a closure has no value yet
                reached = getclosurevars(own)
                values = [*reached.nonlocals.values(), *reached.globals.values()]
                found += [value for value in values if all(value is not old for old in found)]
    return found[1:]


class _Recorded(TorchFunctionMode):
    """Refuses functions that look at the graph, which slices change, or that change a value."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        is_value = bool(args) and isinstance(args[0], Tensor) and not args[0].is_meta
        writes = name == "__setitem__" or name.startswith("__i") or name.strip("_") + "_" == name
        if func in OF_THE_GRAPH or (is_value and writes):
            raise NotImplementedError(f"{name} of a loss on tensors without values")
        return func(*args, **(kwargs or {}))


class _SameCalls(TorchFunctionMode):
    """Refuses other functions, or dimensions, than in the first run of a loss, which it notes.

    Operators were divided for these: a sum over another dimension would be that of a slice.
    """

    def __init__(self, noted: list[Any]) -> None:
        super().__init__()
        self._noted, self._is_first, self._at = noted, not noted, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = func, form(flatten((args, kwargs or {}))[1])
        if self._is_first:
            self._noted.append(call)
        elif self._noted[self._at : self._at + 1] != [call]:
            raise OtherPathError(f"a loss calls {func} otherwise than at first")
        self._at += 1
        return func(*args, **(kwargs or {}))


def _as_before(loss: Any, noted: list[Any]) -> Callable[..., Any]:
    """Return a loss that refuses other calls than those noted, or notes them if there are none."""

    def same(*given: Any) -> Any:
        with _SameCalls(noted):
            return loss(*given)

    return same


class DividedCode:
    """Computes a loss of an output and its target in shards along axes.

    Without a `loss` it computes any `Code`, and gathers what all other functions take.
    """

    def __init__(self, axes: Axes, loss: Any = None) -> None:
        self._axes, self._loss = axes, loss
        self._num_calls = 0
        self._divided: dict[Any, DividedLayer | None] = {}
        """The code for each kind of tensors; None where it needs whole values."""
        self._calls: dict[Any, list[Any]] = {}
        """The calls of the loss in its first run, for each kind of tensors."""

    def call(self, function: "partial[Any]", noted: Noted) -> Any:
        """Return the results, of which scalars are whole on each device.

        All devices must make the same calls.

        Code that reads values, draws random numbers or takes another path than in its first
        micro-batch gets whole values.
        """
        code, given = function.func, function.args
        if self._loss is not None:
            code, given = self._loss, given[-2:]
        leaves, structure = flatten(given)
        layouts = tuple(map(layout_on, leaves))
        if not any(layouts):
            return function()
        if self._loss is None and not isinstance(code, Code):
            return called_alike(None, self._axes, function, noted)
        kind = (
            code if isinstance(code, Code) else None,
            form(structure),
            *(
                (leaf.dtype, _without_sizes(layout), *(n == 1 for n in _whole_shape(leaf, layout)))
                for leaf, layout in zip(leaves, layouts, strict=True)
            ),
        )
        if kind not in self._divided:
            planned = self._planned(_CodeLayer(code), given, layouts)
            self._divided[kind] = planned if self._is_planned_by_all(planned, leaves[0]) else None
        divided = self._divided[kind]
        if divided is not None:
            self._num_calls += 1
            is_early = self._loss is not None and self._num_calls <= _EARLY
            kept = kept_by(_CodeLayer(code).modules()) if is_early else []
            same = code
            if self._loss is not None:
                same = _as_before(code, self._calls.setdefault(kind, []))
            try:
                return divided.call(partial(same, *given), {})
            except OtherPathError:  # all devices raise it alike
                self._divided[kind] = None
                put_back(kept)
        return called_alike(None, self._axes, partial(code, *given), {})

    def _planned(self, layer: nn.Module, given: Any, layouts: Layouts) -> DividedLayer | None:
        """Record the code on tensors of whole sizes without values, and divide its calls."""
        leaves, structure = flatten(given)
        try:
            whole = [stand_in_of(*each) for each in zip(leaves, layouts, strict=True)]
            given = unflatten(structure, whole)
            plan = _plan(as_layers([layer]), given, layouts, self._axes)
        except Exception:  # of any class: it is the user's code, which now runs on whole values
            return None
        return None if plan is None else DividedLayer(NO_LAYER, layer, plan, self._axes)

    def _is_planned_by_all(self, planned: DividedLayer | None, beside: Tensor) -> bool:
        """Tell whether all devices have the same plan; a plan may fail on one of them only."""
        calls = () if planned is None else planned.plan.calls
        own = found = crc32(repr(calls).encode())
        for axis in self._axes:
            number = torch.tensor([found], device=beside.device)
            rows = axis.all_gather(number, "whether all shards can divide the loss")
            found = own if all(int(row) == own for row in rows) else -1
        return found >= 0


def _plan(layers: Layers, given: Any, layouts: Layouts, axes: Axes) -> LayerSharding | None:
    """Return the division of the code; None if it cannot be divided."""
    # the solver takes a while to import
    from penstock.sharding.costs import Costs
    from penstock.sharding.program import LayerProgram, Task, priced

    graph = record_graph(layers, given)
    results = [n for n in graph.outputs if graph.tensors[n].shape]
    graph = replace(graph, outputs=tuple(n for n in graph.outputs if n not in results))
    numbers = sorted(graph.entering[0])  # in the order of the tensors
    is_known = len(numbers) == len(layouts)
    if not is_known or why_whole(graph, 0) or any(call.draws for call in graph.calls):
        return None
    entering = zip(numbers, map(_without_sizes, layouts), strict=True)
    borders = {number: layout for number, layout in entering if layout is not None}
    costs = Costs.usual([axis.size for axis in axes])
    task = Task(costs=costs, allow=lambda *_: True, rests=lambda *_: (I,))
    program, whole = LayerProgram(graph, 0, task, borders), (I,) * len(axes)
    solved = program.solve(_BYTE_S)
    plan = priced(graph, layers.steps[0].path, costs, program.calls, solved, borders)
    # results stay in slices: an operation that needs whole ones gathers them
    leaving = {
        (k, place): planned.gives[place]
        for k, (call, planned) in enumerate(zip(program.calls, solved.calls, strict=True))
        for place, n in enumerate(call.gives)
        if n in results and R not in planned.gives[place] and planned.gives[place] != whole
    }
    return replace(plan, leaving=leaving)


_EARLY = 8
"""Calls whose traces in Python are undone if they take another path: later ones rarely do."""
_BYTE_S = 1e-7
"""Seconds per byte: the price at which slices stay slices, even if small ones gather faster."""


def _whole_shape(tensor: Tensor, layout: Layout | None) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    return shape if layout is None else whole_size(shape, None, layout)[0]


def _without_sizes(layout: Layout | None) -> Layout | None:
    if layout is None:
        return None
    return tuple(S(state.dim) if isinstance(state, S) else state for state in layout)
