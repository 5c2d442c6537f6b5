"""A captured model cut into stages: who runs what, and what each sends to whom."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.model.pytree import with_new_containers

from .blocks import watch
from .captured import Captured
from .events import Header, ValueId
from .forward_pass import Perform, plainly
from .header_cache import SealedHeader, Seen
from .inputs import ROUTED, names_of_positions, routed
from .replay import Replay
from .routes import holders, sends, stages_of_calls, stages_of_events
from .tied_weights import Tied, check_names, find_tensor, find_tied


@dataclass(frozen=True, slots=True)
class _Part:
    """What is the same for every micro-batch of a stage.

    `parameters` are the ids of all parameters, or of what stands in their place; `places` gives
    what is sent for each borrowed one.  `lent` are parameters that others borrow, `passed_on` what
    a later stage borrows too.
    """

    parameters: frozenset[int]
    wanted: frozenset[ValueId] | None
    places: Mapping[int, ValueId]
    borrowers: frozenset[str]
    lent: Mapping[ValueId, Tensor]
    passed_on: tuple[ValueId, ...]


class Cut:
    """A captured model cut into stages."""

    def __init__(self, captured: Captured, partition: tuple[int, ...]) -> None:
        check_names(captured.model, captured.parameters)
        self.captured, self.partition = captured, partition
        self.stage_of = stages_of_calls(captured.calls, partition)
        self._events = tuple(
            placed
            for of_mode in captured.recorded
            for placed in stages_of_events(of_mode.events, self.stage_of, len(partition))
        )
        self.holders = holders(self._events)
        self.tied = find_tied(captured.parameters, captured.names_in, self.stage_of, self._events)
        self.holders.update({tied.value: tied.stages for tied in self.tied})
        self.sends = sends(self.holders, len(partition))
        self._positions = names_of_positions(captured.model)
        self._names: dict[int, str] = {}
        self._parts: dict[int, _Part] = {}
        self._seen: dict[int, Seen] = {}

    @property
    def num_stages(self) -> int:
        return len(self.partition)

    def borrowed(self, stage: int) -> tuple[Tied, ...]:
        """Give the parameters that a stage uses, or passes on, and that have their home before."""
        if self.captured.decides:  # what crosses goes from stage to stage
            return tuple(t for t in self.tied if t.stages[0] < stage <= t.stages[-1])
        return tuple(t for t in self.tied if stage in t.stages[1:])

    def lent(self, stage: int) -> tuple[Tied, ...]:
        """Give the parameters that have their home on a stage, and others use."""
        return tuple(tied for tied in self.tied if tied.stages[0] == stage)

    @property
    def names(self) -> dict[int, str]:
        """The blocks by the id of their module; those of a copy are its own."""
        if not self._names:
            self._names = watch(self.captured.model, self.captured.blocks)
        return self._names

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_names": {}, "_parts": {}, "_seen": {}}

    def wanted(self, stage: int) -> frozenset[ValueId] | None:
        """Give the values that a stage sends on; None: whatever is alive."""
        if self.captured.decides:
            return None
        return frozenset(v for values in self.sends[stage].values() for v in values)

    def replay(
        self,
        stage: int,
        received: Mapping[ValueId, Tensor],
        header: Header,
        perform: Perform = plainly,
    ) -> Replay:
        """Make the pass of a stage on one micro-batch; `run` runs it."""
        part = self._part(stage)
        replay = Replay(
            self.names,
            part.parameters,
            stage,
            self.stage_of,
            received=received,
            header=header,
            wanted=part.wanted,
            lent={number: received[value] for number, value in part.places.items()},
            borrowers=part.borrowers,
            perform=perform,
            sees_all=self.captured.needs_all,
            seen=self._seen.setdefault(stage, Seen()),
        )
        replay.keep = self.captured.keep
        return replay

    def sealed(self, stage: int, header: Header) -> SealedHeader:
        """Give a stage's header as it travels: the same object for the same events."""
        return self._seen[stage].sealed(header)

    def sent_on(self, replay: Replay, stage: int) -> dict[int, dict[ValueId, Tensor]]:
        """Give what a stage sends to whom after its pass: values, and parameters with them."""
        if stage == self.num_stages - 1:
            return {}
        part = self._part(stage)
        passed_on = {value: replay.received[value] for value in part.passed_on}
        leaving = {**replay.leaving(), **part.lent, **passed_on}
        if self.captured.decides:
            return {stage + 1: leaving}
        return {
            peer: {value: leaving[value] for value in values if value in leaving}
            for peer, values in self.sends[stage].items()
        }

    def _part(self, stage: int) -> _Part:
        """Give what is the same for every micro-batch of a stage."""
        if stage not in self._parts:
            self._parts[stage] = self._make_part(stage)
        return self._parts[stage]

    def _make_part(self, stage: int) -> _Part:
        model, borrowed = self.captured.model, self.borrowed(stage)
        own = self.parameters_of(stage)
        away = {name for tied in borrowed for name in tied.names}
        found = ((tied.value, find_tensor(model, n)) for tied in borrowed for n in tied.names)
        places = (find_tensor(model, name) for name in self.captured.parameters)
        return _Part(
            parameters=frozenset(id(place) for place in places if place is not None),
            wanted=self.wanted(stage),
            places={id(place): value for value, place in found if place is not None},
            borrowers=frozenset(
                block
                for block in self.captured.blocks
                if away.intersection(self.captured.names_in(block))
            ),
            lent={t.value: next(own[n] for n in t.names if n in own) for t in self.lent(stage)},
            passed_on=tuple(tied.value for tied in borrowed if stage < tied.stages[-1]),
        )

    def parameters_of(self, stage: int) -> dict[str, nn.Parameter]:
        """Give the parameters that a stage has: of its blocks, of code between them, as home."""
        found = {name: find_tensor(self.captured.model, name) for name in self.names_of(stage)}
        return {name: p for name, p in found.items() if isinstance(p, nn.Parameter)}

    def names_of(self, stage: int) -> tuple[str, ...]:
        """Give the names of the parameters that a stage has; the first one has the unused, too."""
        captured, away = self.captured, {n for t in self.borrowed(stage) for n in t.names}
        blocks = dict.fromkeys(block for (block, _), at in self.stage_of.items() if at == stage)
        found = [name for block in blocks for name in captured.names_in(block)]
        found += [name for event, at in self._events if at == stage for name in event.parameters]
        if stage == 0:  # what nobody uses must be somewhere
            found += self._unused
        first = {captured.parameters[name] for name in found if name not in away}
        return tuple(name for name, known_as in captured.parameters.items() if known_as in first)

    @property
    def _unused(self) -> list[str]:
        """Names of the parameters that neither a block has nor code between blocks uses."""
        captured = self.captured
        used = {n for block in captured.blocks for n in captured.names_in(block)}
        used |= {name for event, _ in self._events for name in event.parameters}
        first = {captured.parameters[name] for name in used}
        return [name for name, known_as in captured.parameters.items() if known_as not in first]

    def run(self, replay: Replay, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a pass; give the model's output if it is the last stage's."""
        if self.captured.inputs == ROUTED:
            args, kwargs = routed(replay, args, kwargs, self._positions)
        else:
            args, kwargs = with_new_containers((args, kwargs))
        return replay.run(self.captured.model, args, kwargs)
