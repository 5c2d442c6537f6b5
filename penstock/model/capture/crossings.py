"""Run a captured model whole, and note the values that pass from block call to block call."""

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from penstock.model.pytree import flatten, with_new_containers
from penstock.model.stage_plan import Crossing

from .captured import Captured
from .events import INPUT, Info, ValueId
from .forward_pass import Perform
from .inputs import ROUTED, Call, names_of_positions, routed
from .replay import Replay
from .routes import holders, stages_of_calls, stages_of_events
from .tied_weights import find_tensor, find_tied
from .watch import watch


def run_noting(
    captured: Captured, call: Call, perform: Perform
) -> tuple[Any, tuple[Crossing, ...]]:
    """Run a model on its arguments; note what would cross if each call were a stage.

    What is between two calls belongs to the first of them, and what comes before all calls to the
    very first one.
    """
    num_calls = len(captured.calls)
    alone = stages_of_calls(captured.calls, (1,) * num_calls)
    events = [
        placed
        for of_mode in captured.recorded
        for placed in stages_of_events(of_mode.events, alone, num_calls)
    ]
    held = holders(events)
    wanted = {v: at for v, at in held.items() if len(at) > 1 or v.event.block.startswith(INPUT)}
    parameters = (find_tensor(captured.model, name) for name in captured.parameters)
    replay = _WithoutValues(
        watch(captured.blocks),
        frozenset(id(tensor) for tensor in parameters if tensor is not None),
        0,
        dict.fromkeys(alone, 0),
        received={},
        header={},
        wanted=frozenset(wanted),
        perform=perform,
        sees_all=captured.needs_all,
    )
    is_routed = captured.inputs == ROUTED
    if is_routed:
        args, kwargs = routed(replay, *call, names_of_positions(captured.model))
    else:
        args, kwargs = with_new_containers(call)
    output = replay.run(captured.model, args, kwargs)
    everywhere, held_at_end = () if is_routed else _all(call), replay.leaving()
    crossings = [
        *(Crossing(-1, (0,), (tensor,)) for tensor in everywhere),
        *(_crossing(v, at, held_at_end[v]) for v, at in wanted.items() if v in held_at_end),
        *(Crossing(num_calls - 1, (), (tensor,)) for tensor in _all(output)),
    ]
    for tied in find_tied(captured.parameters, captured.names_in, alone, events):
        tensor = find_tensor(captured.model, tied.names[0])
        if tensor is not None:
            first, *later = tied.stages
            crossings.append(Crossing(first, tuple(later), (tensor,), is_weight=True))
    return output, tuple(sorted(crossings, key=attrgetter("producer")))


class _WithoutValues(Replay):
    """A pass on meta tensors that looks like one on the CPU to the code between calls.

    What this makes itself, such as positions and masks, has values that it may look at.
    """

    def describe(self, tensor: Tensor, value: ValueId) -> Info:
        return Info.of(tensor, value, torch.device("cpu"))


def _crossing(value: ValueId, calls: tuple[int, ...], tensor: Tensor) -> Crossing:
    if value.event.block.startswith(INPUT) and value.place >= 0:
        return Crossing(-1, calls, (tensor,))
    return Crossing(calls[0], calls[1:], (tensor,))


def _all(value: Any) -> list[Tensor]:
    return flatten(value)[0]
