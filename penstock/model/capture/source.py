"""A captured model as layers: each block call is a layer; a stage runs the model's forward."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from penstock.errors import CutError
from penstock.model.layers import Layers
from penstock.model.materialize import Mine, Placed, move_or_make_stages
from penstock.model.owned import Between
from penstock.model.pytree import flatten
from penstock.model.stage_plan import MODEL_INPUT, Crossing, Perform, StagePlan, Step, Value
from penstock.schedules.transfers import Transfer
from penstock.trace.units import columns, count_text

from .captured import Captured
from .events import INPUT, EventKey, Info, SealedHeader, ValueId, name_of
from .inputs import (
    EVERYWHERE,
    ROUTED,
    arguments_for,
    as_call,
    as_inputs,
    names_of_positions,
    refuse_microbatches,
)
from .replay import Replay, StagePart
from .routes import BlockCall, holders, stages_of_events
from .stages import CutModel
from .tied_weights import empty_buffers, find_tensor, find_tied, release
from .watch import watch

OUTPUT: Value = (-2, 0)
"""The model's output."""
_NO_MODULE = nn.Identity()
"""The module of an operation between blocks that draws random numbers; it runs as a layer."""
Bundle = tuple[SealedHeader | None, dict[ValueId, Tensor]]
"""A message to another stage: a header for the next stage, and values by name."""


def captured_layers(captured: Captured) -> "CapturedLayers":
    """Return a captured model's block calls as layers."""
    by_call = {
        call: Step(index, name_of(*call), call[0], captured.blocks[call[0]], (), ((index, 0),))
        for index, call in enumerate(captured.calls)
    }
    steps = tuple(by_call.values())
    return CapturedLayers(
        steps, captured.model, captured.together, captured=captured, by_call=by_call
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedLayers(Layers):
    """Layers that the forward of a captured model calls."""

    captured: Captured
    by_call: Mapping[BlockCall, Step]
    """The layer of each block call."""

    def run(self, inputs: Any, perform: Perform | None = None) -> Any:
        call = as_call(inputs)
        if perform is None:
            return self.captured.model(*call[0], **call[1])
        whole = CutModel(self.captured, (len(self.steps),))
        return whole.run_stage(0, call, {}, None, self._performed_by(perform)).output

    def run_noting(self, inputs: Any, perform: Perform) -> tuple[Any, tuple[Crossing, ...]]:
        """Run all layers in one pass, and record the transfers if each call were a stage.

        Operations between two calls belong to the first call, and operations before all calls to
        the first call of all.
        """
        # 1. Find the values that cross if each call is a stage, and those of the model's inputs.
        captured, call, num_calls = self.captured, as_call(inputs), len(self.steps)
        alone = {call: number for number, call in enumerate(captured.calls)}
        events = [
            placed
            for of_mode in captured.recorded
            for placed in stages_of_events(of_mode.events, alone, num_calls)
        ]
        wanted = {
            value: at
            for value, at in holders(events).items()
            if len(at) > 1 or value.event.block.startswith(INPUT)
        }
        # 2. Run one stage that has all calls, and keeps these values.
        parameters = (find_tensor(captured.model, name) for name in captured.parameters)
        part = StagePart(
            stage=0,
            stage_of=dict.fromkeys(alone, 0),
            names=watch(captured.blocks),
            parameters=frozenset(id(tensor) for tensor in parameters if tensor is not None),
            wanted=frozenset(wanted),
            sees_all=captured.needs_all,
        )
        replay = _WithoutValues(part, {}, {}, self._performed_by(perform))
        positions = names_of_positions(captured.model)
        args, kwargs = arguments_for(replay, captured.inputs, call, positions)
        output, crossings = replay.run(captured.model, args, kwargs), list[Crossing]()
        # 3. List inputs, values between calls, outputs, and parameters of several calls.
        for tensor in () if captured.inputs == ROUTED else flatten(call)[0]:
            crossings.append(Crossing(-1, (0,), (tensor,)))
        leaving = replay.leaving()
        for value, at in wanted.items():
            if value in leaving:
                is_input = value.event.block.startswith(INPUT) and value.place >= 0
                first, *later = (-1, *at) if is_input else at
                crossings.append(Crossing(first, tuple(later), (leaving[value],)))
        for tensor in flatten(output)[0]:
            crossings.append(Crossing(num_calls - 1, (), (tensor,)))
        for tied in find_tied(captured.parameters, captured.names_in, alone, events):
            weight = find_tensor(captured.model, tied.names[0])
            if weight is not None:
                first, *later = tied.stages
                crossings.append(Crossing(first, tuple(later), (weight,), is_weight=True))
        return output, tuple(sorted(crossings, key=attrgetter("producer")))

    def plan_stages(self, partition: tuple[int, ...]) -> tuple[StagePlan, ...]:
        cut = CutModel(self.captured, partition)
        starts = [sum(partition[:stage]) for stage in range(len(partition))]
        rows = [self.steps[n : n + count] for n, count in zip(starts, partition, strict=True)]
        return tuple(self._plan_stage(cut, stage, steps) for stage, steps in enumerate(rows))

    def _plan_stage(self, cut: CutModel, stage: int, steps: tuple[Step, ...]) -> StagePlan:
        captured, last = self.captured, cut.num_stages - 1
        routed, names = captured.inputs == ROUTED, cut.names_of(stage)
        sent = cut.sends[stage]
        targets = [p for p in range(last, stage, -1) if cut.feeds(stage, p)]
        return StagePlan(
            index=stage,
            steps=steps,
            reads_input=stage == 0 or not routed,
            imports={p: _bundle_on(p, stage) for p in range(stage) if cut.feeds(p, stage)},
            exports={p: _bundle_on(stage, p) for p in targets},
            transfers=tuple(
                Transfer(producer=stage, consumer=p, values=tuple(map(str, sent.get(p, ()))))
                for p in targets
            ),
            output=(OUTPUT,) if stage == last else (),
            parameters=names,
            num_parameters=sum(captured.sizes[n] for n in {captured.parameters[n] for n in names}),
            run=partial(self._run_stage, cut, stage, targets),
            any_shape=True,
            shares_input=not routed and last > 0,
            decides=captured.decides,
            draws_between=captured.draws_between,
            differentiates=captured.differentiates,
            between=Between.of(
                captured.model, names, [step.path for step in steps], captured.blocks
            ),
        )

    def _run_stage(
        self,
        cut: CutModel,
        stage: int,
        targets: Sequence[int],
        values: dict[Value, Any],
        perform: Perform,
    ) -> None:
        received: dict[ValueId, Tensor] = {}
        told = None
        for value in [v for v in values if v != MODEL_INPUT]:
            sealed, sent = values.pop(value)
            received.update(sent)
            told = sealed or told
        refuse_microbatches(values.get(MODEL_INPUT), self.captured.model)
        call = as_call(values[MODEL_INPUT]) if MODEL_INPUT in values else ((), {})
        if self.captured.inputs != ROUTED and cut.num_stages > 1:
            for tensor in flatten(call)[0]:
                if tensor.requires_grad:
                    raise CutError(
                        f"an input of shape {tuple(tensor.shape)} requires grad, and is given to "
                        "every stage: its gradient would be in as many parts. Capture the model "
                        "with inputs='first'"
                    )
        ran = cut.run_stage(stage, call, received, told, self._performed_by(perform))
        if stage == cut.num_stages - 1:
            values[OUTPUT] = ran.output
        for peer in targets:
            bundle: Bundle = ran.told if peer == stage + 1 else None, ran.sent.get(peer, {})
            values.update(dict.fromkeys(_bundle_on(stage, peer), bundle))

    def _performed_by(self, perform: Perform) -> Any:
        """Return the `perform` of a pass, which runs calls and random operations as layers."""

        def run_event(key: EventKey, function: Any) -> Any:
            if not key.number:
                return perform(self.by_call[key.block, key.call], function)
            # The number, and so the random numbers, depend on the event, not on the partition.
            index = len(self.steps) + 1 + crc32(repr(tuple(key)).encode())
            return perform(Step(index, str(key), "", _NO_MODULE, (), ()), function)

        return run_event

    def place(self, mine: Mine, seed: int, *, draws: bool, placed: Placed | None = None) -> None:
        model, blocks = self.captured.model, self.captured.blocks
        move_or_make_stages(model, blocks, mine, seed, draws=draws, placed=placed)
        release(model, {name for plan, _ in mine for name in plan.parameters})
        own = {step.path for plan, _ in mine for step in plan.steps}
        for name, block in blocks.items():
            if name not in own:
                empty_buffers(block)
        if not mine:  # nothing runs here
            empty_buffers(model)

    def names(self) -> Sequence[str]:
        return tuple(self.captured.parameters)

    def as_one_value(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return as_inputs(args, keywords)

    def has_input(self, name: str) -> bool:
        """Tell whether the example had a tensor of this name, or each stage gets all inputs."""
        of_example = {value.event.block for seen in self.captured.recorded for value in seen.infos}
        return self.captured.inputs == EVERYWHERE or INPUT + name in of_example

    def too_few(self, num_stages: int, most: int) -> CutError:
        kept = f", cut into {most} by together=" if self.captured.together else ""
        return CutError(
            f"{num_stages} stages asked, {len(self.steps)} block calls found{kept}: "
            f"{', '.join(step.name for step in self.steps)}. Name finer blocks "
            "(capture(..., blocks=['encoder.layer.*'])), or ask for fewer stages"
        )

    def describe(self, counts: Sequence[int]) -> str:
        """Return a table with a row for each block call, and notes below it.

        *Live bytes before* are the bytes that would cross a cut before the layer.
        """
        captured, steps = self.captured, self.steps
        rows = [("layer", "block", "module", "parameters", "live bytes before")]
        for step, count, live in zip(steps, counts, captured.live_bytes(), strict=True):
            kind = type(step.module).__name__
            rows.append((str(step.index), step.name, kind, f"{count:,}", f"{live:,}"))
        lines = [
            f"{type(captured.model).__name__}: {count_text(len(steps), 'layer')}, "
            f"{count_text(sum(captured.sizes.values()), 'parameter')}",
            *columns(rows),
        ]
        known_as: dict[str, list[str]] = {}
        for name, first in captured.parameters.items():
            known_as.setdefault(first, []).append(name)
        lines += [f"tied: {' = '.join(names)}" for names in known_as.values() if len(names) > 1]
        names = [step.name for step in steps]
        lines += [f"together: {names[n]} to {names[m]}" for n, m in captured.together]
        if captured.decides:
            lines.append(
                "decides: what is done between blocks depends on the batch or on random numbers, "
                "so that whatever is alive at a cut crosses it"
            )
        lines += [f"warning: {warning}" for warning in captured.warnings]
        return "\n".join([*lines, captured.checked])


class _WithoutValues(Replay):
    """A pass on meta tensors that looks like a pass on the CPU to the code between calls.

    That code may read values of tensors that it makes itself, such as positions and masks.
    """

    def describe(self, tensor: Tensor, value: ValueId) -> Info:
        return Info.of(tensor, value, torch.device("cpu"))


def _bundle_on(source: int, target: int) -> tuple[Value, ...]:
    """Return the value name of the message from one stage to another."""
    return ((-3 - source, target),)
