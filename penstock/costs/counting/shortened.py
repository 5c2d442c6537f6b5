"""Equal layers that follow each other in a model: a few of each run are counted.

    embed ── block ── block ── block ── block ── block ── block ── head      the layers
    embed ── block ── block ── block ─────────────────── block ── head      the shortened ones
             first    alike    alike                     last

The two in the middle have equal layers on both sides, as those that are left out have.  They must
turn out equal, or all layers are counted.  `repeats` then puts the others back as copies.
"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

from penstock.model import stage_plan
from penstock.model.capture.source import CapturedLayers
from penstock.model.layer_list import ListOfModules
from penstock.model.layers import Layers
from penstock.model.pytree import flatten
from penstock.model.stage_plan import Crossing, Perform, Step

from .layer_calls import Facts, facts_of_inputs, own_numbers, without_numbers
from .repeats import Repeat

_COUNTED = 4
"""Layers of a run that are counted: the first, two in the middle, and the last."""
T = TypeVar("T")


def counted_short(
    layers: Layers,
    count: Callable[[Layers, Sequence[Repeat]], T | None],
    own: Collection[int] = (),
    *,
    compile: bool = False,
) -> T:
    """Return what `count` finds for layers shortened by repeats, or else for all layers.

    Args:
        layers: the model.
        count: returns None if layers that are left out are not shown to equal those counted.  What
            it raises for shortened layers is not raised: all layers are counted.
        own: ids of tensors that count in another way than those of the same shape.
        compile: kernels may reach over several layers, so that all are counted.
    """
    short, repeats = (layers, ()) if compile else shortened(layers, own)
    if repeats:
        with suppress(Exception):
            found = count(short, repeats)
            if found is not None:
                return found
    found = count(layers, ())
    assert found is not None, "without repeats there is nothing to show"
    return found


def shortened(layers: Layers, own: Collection[int] = ()) -> tuple[Layers, tuple[Repeat, ...]]:
    """Return the layers without most of each run of equal ones, and what was left out."""
    # 1. Find what to leave out, and the place of each layer among those that are left.
    steps, repeats, gone = layers.steps, list[Repeat](), dict[int, int]()
    is_list = isinstance(layers, ListOfModules)
    numbers = frozenset[str]() if is_list else own_numbers(steps)
    for run in _runs(steps, own, numbers, is_list=is_list):
        if len(run) > _COUNTED:
            left_out = run[_COUNTED - 1 : -1]
            repeats.append(Repeat(left_out[0] - 1 - len(gone), _paths(steps, left_out)))
            gone.update(dict.fromkeys(left_out, run[_COUNTED - 2]))
    if not gone:
        return layers, ()
    kept = [step.index for step in steps if step.index not in gone]
    place = {-1: -1} | {index: n for n, index in enumerate(kept)}
    place |= {index: place[before] for index, before in gone.items()}

    def moved(values: Sequence[stage_plan.Value]) -> tuple[stage_plan.Value, ...]:
        return tuple((place[layer], number) for layer, number in values)

    # 2. Give each the values of the one before; a captured model calls them, and skips the others.
    short = tuple(
        replace(s, index=n, inputs=moved(s.inputs), outputs=moved(s.outputs))
        for n, s in enumerate(steps[index] for index in kept)
    )
    if isinstance(layers, CapturedLayers):
        return _Skipping(
            short,
            layers.model,
            captured=layers.captured,
            by_call=layers.by_call,
            whole=layers,
            gone=frozenset(gone),
            among=place,
            numbers=numbers,
        ), tuple(repeats)
    return replace(layers, steps=short, together=()), tuple(repeats)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Skipping(CapturedLayers):
    """Layers of a captured model, of which a pass leaves some out: they give what they take."""

    whole: CapturedLayers
    gone: Collection[int]
    """Numbers of the layers that are left out, in `whole`."""
    among: Mapping[int, int]
    """The number of each layer of `whole`, or of the one that stands for it, among those left."""
    numbers: Collection[str]
    """Names of attributes that hold a layer's own number."""

    def run_noting(self, inputs: Any, perform: Perform) -> tuple[Any, tuple[Crossing, ...]]:
        result, facts, given = None, None, set[int]()

        def performed(step: Step, function: Any) -> Any:
            nonlocal result, facts, given
            if step.index >= len(self.whole):  # a random operation between layers
                return perform(step, function)
            if step.index in self.gone:
                # It has to be given the result before, and all else as the layer before.
                leaves = flatten((function.args, function.keywords))[0]
                trained = (id(tensor) for tensor in leaves if tensor.requires_grad)
                if facts_of_inputs(step, function) != facts or not given.issuperset(trained):
                    raise ValueError(f"layer {step.label} is given something else")
                return result
            result, facts = perform(self.steps[self.among[step.index]], function), None
            if step.index + 1 in self.gone:
                facts, given = facts_of_inputs(step, function), {*map(id, flatten(result)[0])}
            return result

        with without_numbers((step.module for step in self.steps), self.numbers):
            output, crossings = self.whole.run_noting(inputs, performed)
        return output, tuple(map(self._moved, crossings))

    def _moved(self, crossing: Crossing) -> Crossing:
        """Return a crossing between layers that are left: the last of a run takes for others."""
        if crossing.producer in self.gone:
            raise ValueError("a layer that was left out gives something else")
        users = dict.fromkeys(self.among[n] + (n in self.gone) for n in crossing.consumers)
        return crossing._replace(producer=self.among[crossing.producer], consumers=tuple(users))


def _paths(steps: Sequence[Step], numbers: Sequence[int]) -> tuple[str, ...]:
    return tuple(steps[n].path for n in numbers)


def _runs(
    steps: Sequence[Step], own: Collection[int], numbers: Collection[str], *, is_list: bool
) -> list[list[int]]:
    """Return runs of layers that are equal, and share nothing with other layers.

    In a list each takes what the one before gives, and only the next one takes what it gives.  Of
    a captured model this is seen when it runs, and its layers may have `numbers` of their own.
    """
    facts = [Facts(step.module, own, numbers) for step in steps]
    holders = Counter(thing for of_layer in facts for thing in of_layer.owned)
    readers = Counter(value for step in steps for value in step.inputs)
    kinds: list[Hashable] = []
    for step, found in zip(steps, facts, strict=True):
        is_alone = all(holders[thing] == 1 for thing in found.owned)
        before = steps[step.index - 1].outputs if step.index else ()
        is_link = step.inputs == before and all(readers[v] == 1 for v in (*before, *step.outputs))
        may = found.is_shown and is_alone and (is_link or not is_list)
        kinds.append((found.kind, len(step.outputs)) if may else step.index)
    groups = groupby(range(len(steps)), key=kinds.__getitem__)
    return [list(group) for _, group in groups]
