"""A captured model as layers: each block call is one, and a stage runs the model's own forward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from penstock.errors import CutError, PartitionError
from penstock.model.layers import Layers, check_sharing
from penstock.model.materialize import move_or_make_all
from penstock.model.output_loss import output_loss
from penstock.model.pytree import flatten
from penstock.model.stage_plan import MODEL_INPUT, Perform, StagePlan, Step, Value
from penstock.model.stages import plan_stages
from penstock.torch_private import children_of, parameters_of, registered_of

from .captured import Captured
from .describe import described
from .events import EventKey, Header, ValueId, name_of
from .exported import Exported
from .header_cache import SealedHeader
from .inputs import ROUTED, as_call, as_inputs
from .materialize import Part, move_or_make_parts
from .stages import Cut
from .tied_weights import empty_buffers, release

OUTPUT: Value = (-2, 0)
"""The model's output."""


Bundle = tuple[SealedHeader | None, dict[ValueId, Tensor]]
"""What one stage hands to another: values by name; to the next one also what has happened."""


@dataclass(frozen=True, slots=True)
class CapturedLayers(Layers):
    """The block calls of a captured model."""

    captured: Captured

    @classmethod
    def of(cls, captured: Captured) -> "CapturedLayers":
        """Make each block call a layer."""
        steps = []
        for index, (block, number) in enumerate(captured.calls):
            name = name_of(block, number)
            steps.append(Step(index, name, captured.blocks[block], (), ((index, 0),)))
        return cls(tuple(steps), captured)

    @property
    def output(self) -> tuple[Value, ...]:
        return (OUTPUT,)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        inside = {n for first, last in self.captured.together for n in range(first + 1, last + 1)}
        starts = [index for index in range(len(self)) if index not in inside]
        return tuple(zip(starts, [*starts[1:], len(self)], strict=True))

    def check_enough(self, num_stages: int) -> None:
        if num_stages > len(self.spans):
            kept = f", cut into {len(self.spans)} by together=" if self.captured.together else ""
            raise CutError(
                f"{num_stages} stages asked, {len(self)} block calls found{kept}: "
                f"{', '.join(step.name for step in self)}. Name finer blocks "
                "(capture(..., blocks=['encoder.layer.*'])), or ask for fewer stages"
            )

    def __str__(self) -> str:
        return described(self.captured, [step.name for step in self])

    @property
    def original(self) -> nn.Module:
        model = self.captured.model
        return model.original if isinstance(model, Exported) else model

    def keep_only(self, plans: Sequence[StagePlan]) -> None:
        """Give back the memory of the parameters of all stages but those of `plans`."""
        own = [plan for plan in plans if isinstance(plan, CapturedStage)]
        if not own or len(own) == own[0].cut.num_stages:
            return
        kept = {name for plan in own for name in plan.cut.names_of(plan.index)}
        release(self.captured.model, kept)
        mine = {step.index for plan in own for step in plan.steps}
        for step in self.steps:
            if step.index not in mine:
                empty_buffers(step.module)

    def check_sharing(self, stage_of: Sequence[int]) -> None:
        """Refuse a buffer that blocks on different stages share; parameters are sent.

        Raises:
            PartitionError: there is one; or a cut lies between blocks that belong together.
        """
        check_sharing(self, stage_of)
        for first, last in self.captured.together:
            if stage_of[first] != stage_of[last]:
                raise PartitionError(
                    f"the partition puts {self.steps[first].label} on stage {stage_of[first]} and "
                    f"{self.steps[last].label} on stage {stage_of[last]}, which together= keeps "
                    f"on one; let no stage begin at layers {first + 1} to {last}"
                )

    def registered(self, holds: Callable[[int], bool]) -> dict[str, Any]:
        return registered_of(self.captured.model)

    def elsewhere(self, holds: Callable[[int], bool]) -> tuple[str, ...]:
        held = {step.index: holds(step.index) for step in self.steps}
        own = {block for n, (block, _) in enumerate(self.captured.calls) if held[n]}
        return tuple(block for block, _ in self.captured.calls if block not in own)

    @property
    def own_loss(self) -> Callable[[Any, Any], Tensor]:
        return output_loss

    def own_modules(self) -> list[nn.Module]:
        return [self.captured.model]

    def places(self) -> list[tuple[dict[str, Any], str, Any]]:
        model = self.captured.model
        found: list[tuple[dict[str, Any], str, Any]] = []
        for module in model.modules():
            found += [(parameters_of(module), n, p) for n, p in parameters_of(module).items()]
        for name, block in self.captured.blocks.items():
            path, _, last = name.rpartition(".")
            found.append((children_of(model.get_submodule(path)), last, block))
        return found

    def holders(self) -> list[tuple[str, nn.Module]]:
        return [("", self.captured.model)]

    def as_one_value(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        return as_inputs(args, keywords)

    def run(self, inputs: Any, perform: Perform | None = None) -> Any:
        args, kwargs = as_call(inputs)
        if perform is None:
            return self.captured.model(*args, **kwargs)
        whole = Cut(self.captured, (len(self),))
        performing = _performing(perform, self.steps, self.captured)
        return whole.run(whole.replay(0, {}, {}, performing), args, kwargs)


@dataclass(frozen=True, slots=True)
class CapturedStage(StagePlan):
    """One stage of a captured model: its imports and exports are bundles."""

    cut: Cut

    @property
    def any_shape(self) -> bool:
        return True

    @property
    def decides(self) -> bool:
        return self.cut.captured.decides

    @property
    def shares_input(self) -> bool:
        return self.cut.captured.inputs != ROUTED and self.cut.num_stages > 1

    @property
    def num_parameters(self) -> int:
        captured = self.cut.captured
        own = {captured.parameters[name] for name in self.cut.names_of(self.index)}
        return sum(captured.sizes[name] for name in own)

    def names_to(self, peer: int) -> tuple[str, ...]:
        return tuple(map(str, self.cut.sends[self.index].get(peer, ())))

    def run(self, values: dict[Value, Any], perform: Perform) -> None:
        received: dict[ValueId, Tensor] = {}
        header: Header = {}
        for bundles in self.imports.values():
            for sealed, sent in map(values.pop, bundles):
                received.update(sent)
                if sealed is not None:
                    header = sealed.header
        args, kwargs = self._call(values[MODEL_INPUT]) if self.reads_input else ((), {})
        performing = _performing(perform, self.steps, self.cut.captured)
        replay = self.cut.replay(self.index, received, header, performing)
        output = self.cut.run(replay, args, kwargs)
        if self.output:
            values[OUTPUT] = output
            return
        sent_on = self.cut.sent_on(replay, self.index)
        for peer, bundles in self.exports.items():
            told = self.cut.sealed(self.index, replay.header) if peer == self.index + 1 else None
            bundle: Bundle = told, sent_on.get(peer, {})
            values[bundles[0]] = bundle

    def _call(self, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = as_call(inputs)
        if self.cut.captured.inputs != ROUTED and self.cut.num_stages > 1:
            wanting = [t for t in flatten((args, kwargs))[0] if t.requires_grad]
            if wanting:
                raise CutError(
                    f"an input of shape {tuple(wanting[0].shape)} requires grad, and is given to "
                    "every stage: its gradient would be in as many parts. Capture the model with "
                    "inputs='first'"
                )
        return args, kwargs


def _performing(perform: Perform, steps: Sequence[Step], captured: Captured) -> Any:
    """Let a pass run its calls and random operations by `perform`, as layers."""
    by_call = {captured.calls[step.index]: step for step in steps}

    def run_event(key: EventKey, function: Any) -> Any:
        if key.number:
            return perform(_between(key, len(captured.calls)), function)
        return perform(by_call[key.block, key.call], function)

    return run_event


def _between(key: EventKey, num_calls: int) -> Step:
    """Make a layer of an operation between blocks that draws random numbers.

    Its number, and so its stream, depends on where it stands, and not on the cuts.
    """
    return Step(num_calls + 1 + crc32(repr(tuple(key)).encode()), str(key), _NO_MODULE, (), ())


_NO_MODULE = nn.Identity()


@plan_stages.register
def _(layers: CapturedLayers, partition: tuple[int, ...]) -> tuple[StagePlan, ...]:
    cut, num_stages = Cut(layers.captured, partition), len(partition)
    starts = [sum(partition[:stage]) for stage in range(num_stages)]
    return tuple(
        _plan_stage(layers, cut, stage, starts[stage], partition[stage])
        for stage in range(num_stages)
    )


@move_or_make_all.register
def _(
    layers: CapturedLayers,
    mine: Sequence[tuple[StagePlan, torch.device]],
    seed: int,
    *,
    draws: bool,
) -> None:
    calls = layers.captured.calls
    parts = [
        Part(plan.cut.names_of(plan.index), {calls[s.index][0] for s in plan.steps}, device)
        for plan, device in mine
        if isinstance(plan, CapturedStage)
    ]
    move_or_make_parts(layers.captured, parts, seed, draws=draws)


def _plan_stage(
    layers: CapturedLayers, cut: Cut, stage: int, start: int, count: int
) -> CapturedStage:
    last = cut.num_stages - 1
    return CapturedStage(
        index=stage,
        steps=layers.steps[start : start + count],
        reads_input=stage == 0 or layers.captured.inputs != ROUTED,
        imports=_bundles([(p, stage) for p in range(stage) if _feeds(cut, p, stage)], 0),
        exports=_bundles([(stage, p) for p in range(last, stage, -1) if _feeds(cut, stage, p)], 1),
        output=(OUTPUT,) if stage == last else (),
        dead_after=(),
        cut=cut,
    )


def _feeds(cut: Cut, source: int, target: int) -> bool:
    """Whether a stage sends another one anything; its header goes to the next one in any case."""
    if target == source + 1:
        return True
    return not cut.captured.decides and target in cut.sends[source]


def _bundles(edges: list[tuple[int, int]], of: int) -> dict[int, tuple[Value, ...]]:
    return {edge[of]: ((-3 - edge[0], edge[1]),) for edge in edges}
