"""A pass that runs everything, and records the producer and the users of each value."""

import random
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from penstock.errors import CutError, GlueError
from penstock.model.copies import no_leaf
from penstock.model.pytree import flatten, tree_map
from penstock.torch_private import storage_id, uncompiled

from .containers import filled
from .errors import (
    calling_line,
    differentiates,
    keeps_container,
    replaces_parameter,
    writes_into,
    written_through_a_view,
)
from .events import END, START, EventKey, Info, Operation, Told, ValueId, left_behind
from .forward_pass import GRADIENT_HOOKS, Maker, Pass, maker, unchanged
from .ghost import QUESTIONS, Ghost, ghosts_in, map_tensors
from .operations import decides, drawing_nothing, draws, makes_anew

_MOVES = (Tensor.to, Tensor.cpu, Tensor.cuda)
"""Functions that move a tensor to another device."""


@dataclass(frozen=True, slots=True)
class Event:
    """An operation that ran: `changes` are pairs of a value before and after it.

    `parameters` are the names of the parameters that an operation between blocks read.  With
    `decides`, it turned values into a Python number or a shape, and the model's path may depend
    on it.
    """

    key: EventKey
    name: str
    uses: tuple[ValueId, ...]
    gives: tuple[ValueId, ...]
    changes: tuple[tuple[ValueId, ValueId], ...]
    parameters: tuple[str, ...] = ()
    decides: bool = False


class Recording(Pass):
    """Runs the whole model, and records its events.

    Args:
        names: the blocks, by the id of their module.
        parameters: names of the model's parameters, by id.
        on_meta: the model has no values; tensors that meet its tensors move to the meta device.
        together: blocks that stay on one stage, and may pass tensors by side channels.

    Raises:
        CutError: a tensor passes from block to block by a side channel (E2).
    """

    def __init__(
        self,
        names: Mapping[int, str],
        parameters: Mapping[int, str],
        *,
        on_meta: bool,
        together: Sequence[Collection[str]] = (),
    ) -> None:
        super().__init__(names, parameters.keys(), sees_all=True)
        self._parameters, self._on_meta, self._together = parameters, on_meta, together
        self.events: list[Event] = []
        self.infos: dict[ValueId, Info] = {}
        self.has_lists = False
        """The model gets lists of tensors, perhaps with one for each sample."""
        self.needs_all = False
        """An operation without routed tensors was an event, so replays must see these too."""
        self.opaque: list[tuple[EventKey, str]] = []
        self.filled: list[tuple[EventKey, Any]] = []
        """The lists and dicts that blocks have changed; they are held, so that ids stay unique."""
        self._kept: list[Tensor] = []
        self._made: dict[int, Maker] = {}
        """The function that made each tensor without ghosts, by the tensor's storage."""
        self._wrote_outside: CutError | None = None
        self._given_in: tuple[frozenset[int], EventKey] = (frozenset(), START)
        self._outer_state, self.draws_between = _random_states(), False
        self.differentiates = False
        self._read_inside: dict[str, None] = {}
        """Names of parameters of other modules that the block of the event has read."""
        self._order = {START: (0, 0)}
        """The numbers of events and of block calls up to each event."""
        self._written: dict[int, tuple[EventKey, EventKey]] = {}
        """By storage: the event that made the memory, and the event that wrote into it."""
        self._inner: dict[int, tuple[weakref.ref[Tensor], EventKey]] = {}

    def note_inputs(self, told: Told) -> None:
        """Record the routed inputs of the model."""
        gives = tuple(info.value for info in told.infos)
        self.events.append(Event(START, told.name, (), gives, ()))
        self.infos.update((info.value, info) for info in told.infos)

    def event(self, operation: Operation) -> Any:
        # 1. Refuse what no stage could run: side channels, writes through views, other weights.
        caller_arguments = operation[3:]
        if self._on_meta:
            operation = self._on_one_device(operation)
        operation = _uncompiled(operation)
        key, name, function, args, kwargs = operation
        tensors = list(_tensors(args, kwargs))
        self._check_sideways([t for t in tensors if type(t) is not Ghost], key)
        ghosts = ghosts_in(args, kwargs)
        before = [ghost.info.value for ghost in ghosts]
        self._check_written(ghosts, operation)
        self._read_inside = {}
        if key.number == 0:
            self._note_drawn()
            self._check_before(operation)
        # 2. Run it; its own tensors may be used inside, and no others that a block made.
        if function in GRADIENT_HOOKS:  # there is no backward
            operation = operation._replace(function=lambda *_: RemovableHandle(OrderedDict()))
        reals = (self.real(t) if type(t) is Ghost else t for t in tensors)
        self._given_in = frozenset(map(id, reals)), key
        drawn = key.number == 0 or draws(function, args, kwargs)
        with nullcontext() if drawn else drawing_nothing(function):
            result = self.execute(operation)
        self.filled += [(key, part) for part in filled(result, caller_arguments)]
        if key.number == 0:
            self._outer_state = _random_states()
        # 3. Record the event: values that it uses, makes and changes, parameters that it reads.
        told = self.header[key]
        for info in (*told.infos, *(info for _, info in told.changed)):
            self.infos[info.value] = info
        self.opaque += [(key, kind) for kind in left_behind(told.structure)]
        self.events.append(
            Event(
                key,
                name,
                tuple(before),
                tuple(i.value for i in told.infos if i.value.event == key),
                tuple((before[n], info.value) for n, info in told.changed),
                tuple(dict.fromkeys((*self._read_here(tensors), *self._read_inside))),
                decides=key.number > 0 and decides(operation, result),
            )
        )
        self._order[key] = len(self._order), sum(self._calls.values())
        for number, _ in told.changed:
            self._written[storage_id(self.real(ghosts[number]))] = before[number].event, key
        if key.number and not ghosts:
            self.needs_all = True
        return result

    def result_of(
        self, operation: Operation, result: Any, ghosts: list[Ghost], versions: list[int] | None
    ) -> Any:
        if operation.key.number == 0 and torch.is_grad_enabled():
            arguments = {id(ghost.here) for ghost in ghosts}

            def without_graph(tensor: Tensor) -> Tensor:
                """Free the block's graph, as there is no backward."""
                if id(tensor) in arguments:
                    return tensor
                self._inner.pop(id(tensor), None)
                return tensor if tensor.is_leaf else no_leaf(tensor.detach().requires_grad_())

            result = tree_map(without_graph, result)
        return super().result_of(operation, result, ghosts, versions)

    def check_not_kept(self, again: "Recording") -> None:
        """Refuse a list that blocks change in this forward and in another one.

        Each stage would change it for each micro-batch at any time.
        """
        here = {id(part) for _, part in self.filled}
        for key, part in again.filled:
            if id(part) in here:
                raise keeps_container(part, key)

    def running(self) -> EventKey | None:
        """Return the block call that runs now; None between blocks."""
        key = self._given_in[1]
        return key if self.is_inside and key.number == 0 else None

    def unrouted(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensors = list(_tensors(args, kwargs))
        self._check_sideways(tensors, None)
        if self._on_meta and function not in QUESTIONS and any(t.is_meta for t in tensors):
            function, args, kwargs = _joined(function, args, kwargs)
        drawn = draws(function, args, kwargs)
        with nullcontext() if drawn else drawing_nothing(function):
            result = super().unrouted(function, args, kwargs)
        if type(result) is Tensor and makes_anew(function, has_source=bool(tensors)):
            self._made[storage_id(result)] = maker(function)
        return result

    def given(self, key: EventKey, place: int, tensor: Tensor) -> Ghost:
        self._inner.pop(id(tensor), None)
        self._kept.append(tensor)  # so that no other tensor gets its id
        return super().given(key, place, tensor)

    def describe(self, tensor: Tensor, value: ValueId) -> Info:
        return Info.of(tensor, value, torch.device("cpu") if self._on_meta else None)

    def wrote_outside(self, tensor: Tensor, operation: Operation) -> None:
        error = writes_into(tensor, operation, self._parameters.get(id(tensor)))
        made_by = self._made.get(storage_id(tensor))
        if self._wrote_outside is None:
            self._wrote_outside = error if made_by is None else WroteOutside(str(error), made_by)

    def ended(self, output: Any) -> Any:
        self._note_drawn()
        self._check_sideways([t for t in _tensors(output) if type(t) is not Ghost], None)
        uses = tuple(ghost.info.value for ghost in ghosts_in(output))
        self.events.append(Event(END, "output", uses, (), ()))
        return super().ended(output)

    def inside(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Watch an operation inside a block: its results must not reach another block."""
        given, key = self._given_in
        tensors = list(_tensors(args, kwargs))
        if key.number == 0:
            self._check_sideways([t for t in tensors if id(t) not in given], key)
        if key.number == 0 and function not in QUESTIONS:
            own = f"{key.block}."
            read = (name for name in self._read_here(tensors) if not name.startswith(own))
            self._read_inside.update(dict.fromkeys(read))
        result = function(*args, **kwargs)
        if key.number == 0 and any(
            id(t) in given or id(t) in self._inner or isinstance(t, nn.Parameter) for t in tensors
        ):
            old = {id(t) for t in tensors}
            for tensor in _tensors(result):
                if id(tensor) not in old and not isinstance(tensor, nn.Parameter):
                    self._inner[id(tensor)] = weakref.ref(tensor), key
        return result

    def _check_sideways(self, tensors: list[Tensor], user: EventKey | None) -> None:
        """Refuse a tensor that a block made but did not return, if it is used elsewhere (E2)."""
        for tensor in tensors:
            made = self._inner.get(id(tensor))  # the id may be another tensor's by now
            if made is None or made[0]() is not tensor or made[1] == user:
                continue
            maker = made[1].block
            if user is not None and any({maker, user.block} <= set(g) for g in self._together):
                continue
            where, remedy = "the code between blocks", ""
            if user is not None:
                where = f"'{user.block}'"
            if user is not None and user.block != maker:
                remedy = f", or keep both on one stage: together=['{maker}', '{user.block}']"
            raise SideChannel(
                f"a tensor made inside '{maker}' reaches {where} through an attribute, a global "
                f"or a hook, not through a return value (first use: {calling_line()}). Return it "
                f"from the block{remedy}",
                maker,
            )

    def _check_written(self, ghosts: list[Ghost], operation: Operation) -> None:
        """Refuse gradients computed in the forward, and values written through other views.

        Such gradients flow back through blocks.  A stage gets copies of a value and its views.
        """
        key, _, function, args, kwargs = operation
        if function in (torch.autograd.grad, Tensor.backward):
            sources = ghosts_in(args[1:2], kwargs.get("inputs"))
            if not sources or any(g.info.value.event[:2] != key[:2] for g in sources):
                raise differentiates(operation)
            self.differentiates = True
        # A value is as old as the event that names it.  If memory was written into since, its
        # stage and the writer's must be the same: no cut may lie between the two.
        for ghost in ghosts:
            source, writer = self._written.get(storage_id(self.real(ghost)), (START, START))
            given = self._order.get(ghost.info.value.event, (0, 0))
            if given >= self._order[writer]:
                continue
            calls = max(given, self._order.get(source, (0, 0)))[1]
            # No cut lies before the first call.
            if max(calls, 1) != max(self._order[writer][1], 1):
                raise written_through_a_view(operation, ghost, writer)

    def _check_before(self, operation: Operation) -> None:
        """Refuse a block call after a write outside, or with other tensors as its parameters."""
        if self._wrote_outside is not None:
            raise self._wrote_outside
        block = operation.function.args[0] if isinstance(operation.function, partial) else None
        for name, tensor in block.named_parameters() if isinstance(block, nn.Module) else ():
            if id(tensor) not in self._parameters:
                raise replaces_parameter(operation.key, name)

    def _note_drawn(self) -> None:
        """Record that the code between blocks draws from Python's or NumPy's generator."""
        self.draws_between |= _random_states() != self._outer_state

    def _read_here(self, tensors: list[Tensor]) -> tuple[str, ...]:
        return tuple(self._parameters[id(t)] for t in tensors if id(t) in self._parameters)

    # -- without values -----------------------------------------------------------------------

    def _on_one_device(self, operation: Operation) -> Operation:
        """Move an event's tensors to the meta device, if one of them or the block is there."""
        key, _, function, args, kwargs = operation
        reals = [self.real(t) if type(t) is Ghost else t for t in _tensors(args, kwargs)]
        if key.number and not any(t.is_meta for t in reals):
            return operation
        for ghost in ghosts_in(args, kwargs):
            if not self.real(ghost).is_meta:
                ghost.here = self.real(ghost).to("meta")
        function, args, kwargs = _joined(function, args, kwargs)
        return operation._replace(function=function, args=args, kwargs=kwargs)

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return super().operation(function, args, kwargs)
        except RuntimeError as error:  # NotImplementedError is one
            if not self._on_meta or "meta" not in str(error):
                raise
            raise GlueError(
                f"the code between blocks asks for values at {calling_line()}, and the model has "
                f"none yet ({error}). Capture it with its weights, or with example inputs that do "
                "not lead there"
            ) from error


def _random_states() -> tuple[Any, ...]:
    state: Any = numpy.random.get_state()
    return random.getstate(), *(
        part.tobytes() if hasattr(part, "tobytes") else part for part in state
    )


class SideChannel(CutError):
    """A tensor that `block` made but did not return is used elsewhere."""

    def __init__(self, message: str, block: str) -> None:
        super().__init__(message)
        self.block = block


class WroteOutside(CutError):
    """A routed value was written into a tensor that each stage makes itself, by `made_by`."""

    def __init__(self, message: str, made_by: Maker) -> None:
        super().__init__(message)
        self.made_by = made_by


def _tensors(*values: Any) -> Iterator[Tensor]:
    for value in values:
        yield from flatten(value)[0]


def _joined(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Move tensors to the meta device; drop a move away from it."""

    def move(tensor: Tensor) -> Tensor:
        return tensor if type(tensor) is Ghost or tensor.is_meta else tensor.to("meta")

    if function in _MOVES:
        stays = [a for a in args[1:] if not isinstance(a, torch.device | str)]
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
        if not stays and not kwargs:
            return unchanged, args[:1], {}
        return Tensor.to, (args[0], *stays), kwargs
    return (
        function,
        tuple(map_tensors(move, part) for part in args),
        {name: map_tensors(move, part) for name, part in kwargs.items()},
    )


def _uncompiled(operation: Operation) -> Operation:
    """Run a compiled block uncompiled, as compiled code cannot be watched."""
    block = operation.function.args[0] if isinstance(operation.function, partial) else None
    if not isinstance(block, nn.Module):
        return operation
    written = uncompiled(block)
    return operation if written is None else operation._replace(function=written)
