"""A captured model split into stages: their parameters, transfers and execution."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from penstock.model.stage_plan import relays, stage_of_layers

from .captured import Captured
from .events import SealedHeader, ValueId
from .forward_pass import Perform, plainly
from .inputs import Call, arguments_for, names_of_positions
from .replay import Replay, StagePart
from .routes import holders, stages_of_events
from .tied_weights import Tied, check_names, find_tensor, find_tied, ids_of
from .watch import watch


class Ran(NamedTuple):
    """The result of a stage's part of a forward.

    Args:
        output: the model's output, on the last stage.
        told: the header for the next stage, if there is one.
        sent: the values for each other stage.
    """

    output: Any
    told: SealedHeader | None
    sent: dict[int, dict[ValueId, Tensor]]


class CutModel:
    """A captured model split into stages."""

    def __init__(self, captured: Captured, partition: tuple[int, ...]) -> None:
        check_names(captured.model, captured.parameters)
        self.captured, self.num_stages = captured, len(partition)
        self.stage_of = dict(zip(captured.calls, stage_of_layers(partition), strict=True))
        self._events = tuple(
            placed
            for of_mode in captured.recorded
            for placed in stages_of_events(of_mode.events, self.stage_of, self.num_stages)
        )
        self.tied = find_tied(captured.parameters, captured.names_in, self.stage_of, self._events)
        held = {**holders(self._events), **{tied.value: tied.stages for tied in self.tied}}
        self.sends = relays(held, self.num_stages)
        self._positions = names_of_positions(captured.model)
        self._parts: dict[int, StagePart] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_parts": {}}  # a copy's modules are its own

    def run_stage(
        self,
        stage: int,
        call: Call,
        received: Mapping[ValueId, Tensor],
        told: SealedHeader | None = None,
        perform: Perform = plainly,
    ) -> Ran:
        """Run a stage's part of the model on one micro-batch.

        Args:
            stage: the number of the stage.
            call: the model's arguments; empty if they are routed, and the stage is not the first.
            received: values of other stages.
            told: the header of the stages before.
            perform: runs each block call and random operation.
        """
        part = self._part(stage)
        replay = Replay(part, received, told.header if told else {}, perform)
        replay.keep, replay.routed_makers = self.captured.keep, self.captured.makers
        args, kwargs = arguments_for(replay, self.captured.inputs, call, self._positions)
        output = replay.run(self.captured.model, args, kwargs)
        if stage == self.num_stages - 1:
            return Ran(output, None, {})
        passed_on = {value: received[value] for value in part.passed_on}
        leaving = {**replay.leaving(), **part.lent, **passed_on}
        sent = {stage + 1: leaving}
        if not self.captured.decides:  # otherwise all values go from stage to stage
            sent = {
                peer: {value: leaving[value] for value in values if value in leaving}
                for peer, values in self.sends[stage].items()
            }
        return Ran(output, part.cache.sealed(replay.header), sent)

    def feeds(self, source: int, target: int) -> bool:
        """Tell whether a stage sends anything to another: the next one always gets a header."""
        if target == source + 1:
            return True
        return not self.captured.decides and target in self.sends[source]

    def names_of(self, stage: int) -> tuple[str, ...]:
        """Return the names of a stage's parameters; the first stage also has unused ones."""
        captured, away = self.captured, {n for t in self._borrowed(stage) for n in t.names}
        used: list[set[str]] = [set() for _ in range(self.num_stages)]
        for (block, _), at in self.stage_of.items():
            used[at].update(captured.names_in(block))
        for event, at in self._events:
            used[at].update(event.parameters)
        first = {captured.parameters[name] for name in used[stage] if name not in away}
        if stage == 0:  # unused parameters need a stage too
            everywhere = {captured.parameters[n] for names in used for n in names}
            first |= {*captured.parameters.values()} - everywhere
        return tuple(name for name, known_as in captured.parameters.items() if known_as in first)

    def _borrowed(self, stage: int) -> tuple[Tied, ...]:
        """List the parameters of earlier stages that a stage uses or passes on."""
        if self.captured.decides:  # all values go from stage to stage
            return tuple(t for t in self.tied if t.stages[0] < stage <= t.stages[-1])
        return tuple(t for t in self.tied if stage in t.stages[1:])

    def _part(self, stage: int) -> StagePart:
        if stage in self._parts:
            return self._parts[stage]
        # 1. Find the parameters that the stage holds, lends, and borrows.
        captured, borrowed = self.captured, self._borrowed(stage)
        places = ((name, find_tensor(captured.model, name)) for name in captured.parameters)
        held = {name: place for name, place in places if place is not None}
        away = {name: tied.value for tied in borrowed for name in tied.names}
        lent = {
            tied.value: next(p for n in tied.names if isinstance(p := held.get(n), nn.Parameter))
            for tied in self.tied
            if tied.stages[0] == stage
        }
        sends_on = frozenset(v for values in self.sends[stage].values() for v in values)
        # 2. Find the blocks that read borrowed parameters.
        reads = {block: set(captured.names_in(block)) for block in captured.blocks}
        for event, _ in self._events:  # a block may also read parameters of other modules
            if event.key.number == 0 and event.key.block in reads:
                reads[event.key.block].update(event.parameters)
        self._parts[stage] = StagePart(
            stage=stage,
            stage_of=self.stage_of,
            names=watch(captured.blocks),
            sees_all=captured.needs_all,
            parameters=frozenset(map(id, held.values())),
            wanted=None if captured.decides else sends_on,
            places={i: away[n] for n in held.keys() & away for i in ids_of(held[n])},
            borrowers=frozenset(block for block, names in reads.items() if away.keys() & names),
            lent=lent,
            passed_on=tuple(tied.value for tied in borrowed if stage < tied.stages[-1]),
        )
        return self._parts[stage]
