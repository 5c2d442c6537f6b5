"""A captured model as layers: each block call is one, and a stage runs the model's own forward."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from penstock.errors import CutError
from penstock.model.layers import Layers, Source
from penstock.model.materialize import Placed
from penstock.model.owned import Between
from penstock.model.pytree import flatten
from penstock.model.stage_plan import MODEL_INPUT, Crossing, Perform, StagePlan, Step, Value
from penstock.schedules.transfers import Transfer
from penstock.trace.units import columns, count_text

from .captured import Captured
from .crossings import run_noting
from .events import EventKey, ValueId, name_of
from .header_cache import SealedHeader
from .inputs import ROUTED, Call, as_call, as_inputs
from .materialize import Part, move_or_make_parts
from .routes import Call as BlockCall
from .stages import CutModel
from .tied_weights import empty_buffers, release

_HEAD = ("layer", "block", "module", "parameters", "live bytes before")


def described(captured: Captured, names: Sequence[str], counts: Sequence[int]) -> str:
    """Return the table of a model's layers, one for each call of a block, and what is to be known.

    *Live bytes before* is what would cross a cut before the layer, for the example inputs.
    """
    live = captured.live_bytes()
    rows = [
        (str(n), names[n], type(captured.blocks[block]).__name__, f"{counts[n]:,}", f"{live[n]:,}")
        for n, (block, _) in enumerate(captured.calls)
    ]
    head = (
        f"{type(captured.model).__name__}: {count_text(len(rows), 'layer')}, "
        f"{count_text(sum(captured.sizes.values()), 'parameter')}"
    )
    return "\n".join([head, *columns([_HEAD, *rows]), *_remarks(captured, names)])


def _remarks(captured: Captured, names: Sequence[str]) -> Iterator[str]:
    for names_of_one in _tied(captured):
        yield f"tied: {' = '.join(names_of_one)}"
    for first, last in captured.together:
        yield f"together: {names[first]} to {names[last]}"
    if captured.decides:
        yield (
            "decides: what is done between blocks depends on the batch or on random numbers, so "
            "that whatever is alive at a cut crosses it"
        )
    for warning in captured.warnings:
        yield f"warning: {warning}"
    yield captured.checked


def _tied(captured: Captured) -> list[list[str]]:
    known_as: dict[str, list[str]] = {}
    for name, first in captured.parameters.items():
        known_as.setdefault(first, []).append(name)
    return [names for names in known_as.values() if len(names) > 1]


OUTPUT: Value = (-2, 0)
"""The model's output."""
Bundle = tuple[SealedHeader | None, dict[ValueId, Tensor]]
"""What one stage hands to another: values by name; to the next one also what has happened."""


def captured_layers(captured: Captured) -> Layers:
    """Return a captured model's block calls as layers."""
    steps = {
        call: Step(index, name_of(*call), call[0], captured.blocks[call[0]], (), ((index, 0),))
        for index, call in enumerate(captured.calls)
    }
    model = captured.model
    return Layers(
        tuple(steps.values()),
        CapturedForward(captured, steps),
        model,
        captured.together,
    )


@dataclass(frozen=True, slots=True)
class CapturedForward(Source):
    """Runs the layers by the forward of the model that was captured."""

    captured: Captured
    steps: Mapping[BlockCall, Step]

    def run(self, inputs: Any, perform: Perform | None) -> Any:
        call = as_call(inputs)
        if perform is None:
            return self.captured.model(*call[0], **call[1])
        whole = CutModel(self.captured, (len(self.steps),))
        return whole.run_stage(0, call, {}, None, self._performed_by(perform)).output

    def run_noting(self, inputs: Any, perform: Perform) -> tuple[Any, tuple[Crossing, ...]]:
        return run_noting(self.captured, as_call(inputs), self._performed_by(perform))

    def plan_stages(self, partition: tuple[int, ...]) -> tuple[StagePlan, ...]:
        cut = CutModel(self.captured, partition)
        starts = [sum(partition[:stage]) for stage in range(len(partition))]
        steps = tuple(self.steps.values())
        rows = [steps[n : n + count] for n, count in zip(starts, partition, strict=True)]
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
        call = as_call(values[MODEL_INPUT]) if MODEL_INPUT in values else ((), {})
        if self.captured.inputs != ROUTED and cut.num_stages > 1:
            _check_no_gradient(call)
        ran = cut.run_stage(stage, call, received, told, self._performed_by(perform))
        if stage == cut.num_stages - 1:
            values[OUTPUT] = ran.output
        for peer in targets:
            bundle: Bundle = ran.told if peer == stage + 1 else None, ran.sent.get(peer, {})
            values.update(dict.fromkeys(_bundle_on(stage, peer), bundle))

    def _performed_by(self, perform: Perform) -> Any:
        """Return what makes a pass run its calls and random operations by `perform`, as layers."""

        def run_event(key: EventKey, function: Any) -> Any:
            if key.number:
                return perform(_between(key, len(self.steps)), function)
            return perform(self.steps[key.block, key.call], function)

        return run_event

    def place(
        self,
        mine: Sequence[tuple[StagePlan, torch.device]],
        seed: int,
        *,
        draws: bool,
        placed: Placed | None = None,
    ) -> None:
        parts = [Part(p.parameters, p.steps, device) for p, device in mine]
        move_or_make_parts(self.captured, parts, seed, draws=draws, placed=placed)
        blocks = {block for part in parts for block in part.blocks}
        release(self.captured.model, {name for part in parts for name in part.parameters})
        for name, block in self.captured.blocks.items():
            if name not in blocks:
                empty_buffers(block)
        if not parts:  # nothing runs here
            empty_buffers(self.captured.model)

    def names(self) -> Sequence[str]:
        return tuple(self.captured.parameters)

    def as_one_value(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return as_inputs(args, keywords)

    def too_few(self, num_stages: int, most: int) -> CutError:
        kept = f", cut into {most} by together=" if self.captured.together else ""
        return CutError(
            f"{num_stages} stages asked, {len(self.steps)} block calls found{kept}: "
            f"{', '.join(step.name for step in self.steps.values())}. Name finer blocks "
            "(capture(..., blocks=['encoder.layer.*'])), or ask for fewer stages"
        )

    def describe(self, counts: Sequence[int]) -> str:
        return described(self.captured, [step.name for step in self.steps.values()], counts)


def _bundle_on(source: int, target: int) -> tuple[Value, ...]:
    """Name what one stage hands to another."""
    return ((-3 - source, target),)


def _check_no_gradient(call: Call) -> None:
    """Refuse inputs that require grad and are given to every stage."""
    for tensor in flatten(call)[0]:
        if tensor.requires_grad:
            raise CutError(
                f"an input of shape {tuple(tensor.shape)} requires grad, and is given to every "
                "stage: its gradient would be in as many parts. Capture the model with "
                "inputs='first'"
            )


def _between(key: EventKey, num_calls: int) -> Step:
    """Make a layer of an operation between blocks that draws random numbers.

    Its number, and so its stream, depends on where it stands, and not on the cuts.
    """
    index = num_calls + 1 + crc32(repr(tuple(key)).encode())
    return Step(index, str(key), "", _NO_MODULE, (), ())


_NO_MODULE = nn.Identity()
