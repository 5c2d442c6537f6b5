"""A pass of one stage: it runs its part of the model, and replays the earlier stages' part.

before its first block    calls and operations return ghosts, read from the header
its own part              runs on received values and on its own
the next stage's block    the pass ends
"""

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CutError, GlueError, RouteError
from penstock.model.entries import layout_on, whole_size
from penstock.model.pytree import Leaf, flatten, unflatten
from penstock.torch_private import with_torch_function

from .errors import calling_line, writes_into
from .events import (
    END,
    INPUT,
    EventKey,
    Header,
    HeaderCache,
    Info,
    Operation,
    Told,
    ValueId,
    told_structure,
)
from .forward_pass import GRADIENT_HOOKS, Pass, Perform, plainly, unchanged
from .ghost import Ghost, ghosts_in, map_tensors
from .later import Later
from .tied_weights import Absent, Lent, lending


class _StageEnd(BaseException):
    """Leaves the model's forward; `except Exception` in the model does not catch it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePart:
    """The properties of a stage that are the same for every micro-batch.

    Args:
        stage: the number of the stage.
        stage_of: the stage of each call.
        names: the blocks, by the id of their module.
        parameters: ids of all parameters, or of their stand-ins.
        wanted: values that later stages need; None: all that Python still refers to.
        sees_all: operations without routed values may be events.
        places: the value that is received for each borrowed parameter, by the id of its stand-in.
        borrowers: blocks that use borrowed parameters.
        lent: parameters that later stages borrow, by the name of the value.
        passed_on: borrowed parameters that a later stage borrows too.
        cache: the results that the stage has sent before.
    """

    stage: int
    stage_of: Mapping[tuple[str, int], int]
    names: Mapping[int, str]
    parameters: frozenset[int]
    wanted: frozenset[ValueId] | None
    sees_all: bool
    places: Mapping[int, ValueId] = field(default_factory=dict)
    borrowers: frozenset[str] = frozenset()
    lent: Mapping[ValueId, Tensor] = field(default_factory=dict)
    passed_on: tuple[ValueId, ...] = ()
    cache: HeaderCache = field(default_factory=HeaderCache)


class Replay(Pass):
    """One stage's execution of the model on one micro-batch.

    Args:
        part: the stage.
        received: values of other stages.
        header: the results of all operations on the stages before.
        perform: runs each block call and random operation.
    """

    def __init__(
        self,
        part: StagePart,
        received: Mapping[ValueId, Tensor],
        header: Header,
        perform: Perform = plainly,
    ) -> None:
        super().__init__(part.names, part.parameters, perform=perform, sees_all=part.sees_all)
        self._stage, self._stage_of, self._borrowers = part.stage, part.stage_of, part.borrowers
        self._last_stage = max(part.stage_of.values())
        self._wanted, self._cache = part.wanted, part.cache
        self.received, self.header = received, dict(header)
        lent = {number: received[value] for number, value in part.places.items()}
        self._lent = Lent(lent) if lent else None
        self._is_own, self._is_over = part.stage == 0, False
        self._held: dict[ValueId, Tensor] = dict(received)
        self._alive: list[weakref.ref[Ghost]] = []
        self._has_slices = any(layout_on(tensor) is not None for tensor in received.values())
        self._later = Later()
        self._sliced: list[weakref.ref[Ghost]] = []
        """Ghosts of tensors that operations which wait have taken or returned."""
        self._doing: Operation | str = "the model's first operation"

    def run(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Execute the stage's part; return None unless the stage is the last one."""
        # The stage ends by an exception, which skips model code that would restore a mode.
        modes = [ask() for ask, _ in _MODES]
        try:
            output = super().run(model, args, kwargs)
        except _StageEnd:
            for (_, put), mode in zip(_MODES, modes, strict=True):
                put(mode)
            return None
        if self._is_over:
            raise CutError(
                "code around the blocks caught the exception by which a stage leaves the model's "
                "forward where its part ends (`except BaseException`, or a bare `except`); catch "
                "`Exception` there"
            )
        return output

    def leaving(self) -> dict[ValueId, Tensor]:
        """Return the values that later stages need, once the pass has ended."""
        if self._wanted is not None:
            return {value: self._held[value] for value in self._wanted if value in self._held}
        return dict(self._leaving)

    def event(self, operation: Operation) -> Any:
        if self._is_over:  # the model's code caught the exception
            raise _StageEnd
        key = operation.key
        if key.number == 0:
            self._reach(key)
        if not self._is_own:
            return self._replay(operation)
        if operation.function in GRADIENT_HOOKS:
            self._check_made_here(operation.name, ghosts_in(operation.args))
        self._doing = operation
        if self._has_slices:
            ghosts = ghosts_in(operation.args, operation.kwargs)
            if key.number and (waiting := self._waiting_for(operation, ghosts)) is not None:
                return waiting
            self._make_whole(operation, ghosts)
        lent = self._lent
        if lent is not None and key.number == 0 and key.block in self._borrowers:
            function = partial(lending, lent, operation.function)
            operation = operation._replace(function=function)
        return self.execute(operation)

    def _reach(self, key: EventKey) -> None:
        """Begin or end the stage's own part at the call of a block."""
        stage = self._stage_of.get((key.block, key.call))
        if stage is None:
            raise GlueError(
                f"{key} was not called so often with the example inputs; stages are cut "
                "between known calls. Give example inputs that call it as often"
            )
        if stage > self._stage:
            self._end()
        if self._is_own and stage < self._stage:
            raise GlueError(
                f"{key} is called after blocks of a later stage, and came before them with the "
                "example inputs: the model calls its blocks in another order. Keep these on one "
                "stage (together=)"
            )
        self._is_own = self._is_own or stage == self._stage

    def tell(self, key: EventKey, told: Told) -> None:
        """Add the result of an event to the header, as the same object as before if equal."""
        super().tell(key, self._cache.same(key, told))

    def result_of(
        self, operation: Operation, result: Any, ghosts: list[Ghost], versions: list[int] | None
    ) -> Any:
        key, name = operation[:2]
        told = self._cache.one_new.get(key)
        if not key.number and layout_on(result) is not None:
            told = None  # this device has a slice of it
        if told is not None and versions is None and type(result) is Tensor and told.name == name:
            info = told.infos[0]
            if info.fits(result) and id(result) not in [id(ghost.here) for ghost in ghosts]:
                self.header[key] = told  # most events return the same as before
                ghost = Ghost.standing_for(info, result, self.home)
                self._hold(ghost)
                return ghost
        return super().result_of(operation, result, ghosts, versions)

    def describe(self, tensor: Tensor, value: ValueId) -> Info:
        """Describe a tensor, or the whole tensor of a slice."""
        info, layout = super().describe(tensor, value), layout_on(tensor)
        if layout is None:
            return info
        self._has_slices = True
        shape, strides = whole_size(info.shape, info.strides, layout)
        return info._replace(shape=shape, strides=strides)

    def _waiting_for(self, operation: Operation, ghosts: list[Ghost]) -> Any:
        """Return ghosts of the result of an operation on slices, which waits; None if it cannot.

        On the last stage only: no other one has to be told its result.
        """
        key, _, function, args, kwargs = operation
        later = self._later
        own = [g for g in ghosts if layout_on(g.here) is not None or later.waits(g.here)]
        if not own or self._stage < self._last_stage:
            return None
        self.is_inside = True
        try:
            result = later.add(function, *map_tensors(self._here, (args, kwargs)))
        finally:
            self.is_inside = False
        if result is None:
            return None
        known, device = {id(ghost.here): ghost for ghost in ghosts}, own[0].info.device
        leaves, structure = flatten(result)
        given = []
        for place, leaf in enumerate(leaves):
            ghost = known.get(id(leaf))
            ghost = self.given(key, place, leaf) if ghost is None else ghost
            ghost.info = ghost.info._replace(device=device)
            given.append(ghost)
        self._sliced += map(weakref.ref, (*ghosts, *given))
        return unflatten(structure, given)

    def _here(self, tensor: Tensor) -> Tensor:
        """Return the tensor of a ghost, or the stand-in of one that waits."""
        if type(tensor) is not Ghost:
            return self.instead_of(tensor)
        here = tensor.here
        return here if here is not None and self._later.waits(here) else self.real(tensor)

    def _finish(self, ghosts: list[Ghost]) -> None:
        """Run the operations behind ghosts that wait."""
        waiting = [ghost for ghost in ghosts if self._later.waits(ghost.here)]
        if not waiting:
            return
        stand_ins = [ghost.here for ghost in waiting if ghost.here is not None]
        results = self._from_later(self._later.results, stand_ins)
        for ghost, result in zip(waiting, results, strict=True):
            ghost.here, ghost.info = result, self.describe(result, ghost.info.value)

    def _make_whole(self, operation: Operation, ghosts: list[Ghost]) -> None:
        """Finish what waits, and gather slices for an operation that is no layer."""
        here = [ghost.here for ghost in ghosts if ghost.here is not None]
        if operation.key.number and self._later.is_entangled(operation.function, here):
            whole = self._from_later(self._later.whole_again)
            for ghost in (own for ref in self._sliced if (own := ref()) is not None):
                if (new := whole.get(id(ghost.here))) is not None:
                    ghost.here, ghost.info = new, self.describe(new, ghost.info.value)
            self._later, self._sliced = Later(), []
        self._finish(ghosts)
        for ghost in ghosts if operation.key.number else ():
            if layout_on(ghost.here) is not None:
                ghost.here = self._perform_code(unchanged, ghost.here)

    def _from_later(self, run: Callable[..., Any], *given: Any) -> Any:
        self.is_inside, was_inside = True, self.is_inside
        try:
            with with_torch_function():
                return run(*given, self._perform_code)
        finally:
            self.is_inside = was_inside

    def _perform_code(self, code: Callable[..., Any], *tensors: Any) -> Any:
        return self._perform(END, partial(code, *tensors))  # it takes no layer's random numbers

    def _check_made_here(self, name: str, ghosts: list[Ghost]) -> None:
        """Refuse a gradient hook on a value of an earlier stage, which would see a part only."""
        for ghost in ghosts:
            if ghost.info.value in self.received:
                raise CutError(
                    f"'{name}' on the {ghost.info.value}, which an earlier stage than "
                    f"{self._stage} made ({calling_line()}): it would see a part of the gradient "
                    "only. Call it before the next block, or cut elsewhere"
                )

    def wrote_outside(self, tensor: Tensor, operation: Operation) -> None:
        if self._stage < self._last_stage:
            raise writes_into(tensor, operation, None)

    def given(self, key: EventKey, place: int, tensor: Tensor) -> Ghost:
        ghost = super().given(key, place, tensor)
        self._hold(ghost)
        return ghost

    def ended(self, output: Any) -> Any:
        if self._stage < self._last_stage and not self._is_over:
            self._end()  # the model skipped later blocks; the last stage returns the output
        self._doing = "the model's output"
        leaves, structure = flatten(output)
        self._finish(ghosts_in(*leaves))
        reals = [self._unwrapped(leaf) for leaf in leaves]
        return unflatten(told_structure(structure, END), reals)

    def real(self, ghost: Ghost) -> Tensor:
        """Return a ghost's tensor; RouteError if another stage has it and did not send it (E4)."""
        if ghost.here is None:
            doing = self._doing
            if not isinstance(doing, str):
                key, name = doing[:2]
                doing = str(key) if key.number == 0 else f"'{name}', {key}"
            if ghost.info.value.event.block.startswith(INPUT):
                raise RouteError(
                    f"stage {self._stage} needs {ghost.info.value} for {doing}, and the example "
                    "inputs that the model was captured with had no such input, or None there. "
                    "Is its name right? Else capture the model with an example that has it"
                )
            raise RouteError(
                f"stage {self._stage} needs {ghost.info.value} for {doing}, but the plan "
                f"does not send it there ({calling_line()}): the model took another path than "
                "with the example inputs (for another argument, length or mode). Capture it with "
                "an example that takes this path"
            )
        self._finish([ghost])
        return ghost.here

    def instead_of(self, tensor: Tensor) -> Tensor:
        sent = tensor if self._lent is None else self._lent.sent.get(id(tensor), tensor)
        if type(sent) is Absent:
            raise sent.is_read()
        return sent

    def _end(self) -> None:
        """Leave the model's forward; keep the values that Python still refers to."""
        ghosts = [ghost for ref in self._alive if (ghost := ref()) is not None]
        self._is_over = True
        self._leaving = {g.info.value: g.here for g in ghosts if g.here is not None}
        raise _StageEnd

    def _hold(self, ghost: Ghost) -> None:
        assert ghost.here is not None
        if self._wanted is None:
            self._alive.append(weakref.ref(ghost))
        elif ghost.info.value in self._wanted:
            self._held[ghost.info.value] = ghost.here

    def _note_changes(self, key: EventKey, ghosts: list[Ghost], versions: list[int]) -> Any:
        changed = super()._note_changes(key, ghosts, versions)
        for number, _ in changed:
            self._hold(ghosts[number])
        return changed

    def _replay(self, operation: Operation) -> Any:
        """Return the result of an event on another stage."""
        key, name = operation[:2]
        told = self.header.get(key)
        if told is None or told.name != name:
            other = "nothing" if told is None else f"'{told.name}'"
            raise GlueError(
                f"stage {self._stage}: the code between blocks ran '{name}' as {key}, where an "
                f"earlier stage ran {other} ({calling_line()}). It must depend on the model's "
                "inputs only: look for a rank, the time, a generator of its own, or state that "
                "an earlier step left"
            )
        # 1. Without changes in place, the result has new tensors only: stand-ins for them.
        ghosts: list[Ghost] = []
        if told.changed or any(info.value.event != key for info in told.infos):
            ghosts = ghosts_in(operation.args, operation.kwargs)
        elif type(told.structure) is Leaf:
            return self.stand_in(told.infos[0])
        # 2. Repeat the changes of arguments, then look up results that are arguments.
        for number, info in told.changed:
            ghosts[number].info, ghosts[number].here = info, self.received.get(info.value)
            self._pass_on(ghosts[number])
        known = {ghost.info.value: ghost for ghost in ghosts}
        given = []
        for info in told.infos:
            ghost = known.get(info.value)
            given.append(self.stand_in(info) if ghost is None else ghost)
        return unflatten(told.structure, given)

    def stand_in(self, info: Any) -> Ghost:
        ghost = Ghost.standing_for(info, self.received.get(info.value), self.home)
        self._pass_on(ghost)
        return ghost

    def _pass_on(self, ghost: Ghost) -> None:
        """Keep a received value for later stages while Python refers to it, if paths may vary."""
        if ghost.here is not None and self._wanted is None:
            self._alive.append(weakref.ref(ghost))


_MODES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_default_dtype, torch.set_default_dtype),
    *(
        (partial(ask, kind), partial(put, kind))
        for kind in ("cpu", "cuda")
        for ask, put in (
            (torch.is_autocast_enabled, torch.set_autocast_enabled),
            (torch.get_autocast_dtype, torch.set_autocast_dtype),
        )
    ),
)
"""(getter, setter) of torch's modes of a thread, which a model may change."""
