"""The model as data: its block calls in order, and the values between them."""

import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from penstock.errors import CutError

from .blocks import find_blocks, original_class, watch, watch_functions
from .inputs import EVERYWHERE, ROUTED, as_call, routed
from .record import Event, Recording, SideChannel
from .routes import Call, calls_of, holders
from .state import attributes, check_unchanged, outer_state, put_back
from .values import START, Info, ValueId


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a recording in one mode, training or evaluation, has shown."""

    training: bool
    events: tuple[Event, ...]
    infos: Mapping[ValueId, Info]


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A model, its blocks, and what happened when it was run on the example inputs.

    `calls` are the block calls in the order of their execution.  `inputs` says whether the model's
    inputs are given to the first stage only, and travel, or to every stage.  With `decides`, code
    between blocks has looked at values, so that the model may take other ways.
    """

    model: nn.Module
    blocks: Mapping[str, nn.Module]
    calls: tuple[Call, ...]
    recorded: tuple[Recorded, ...]
    inputs: str
    decides: bool
    needs_all: bool
    warnings: tuple[str, ...]
    parameters: Mapping[str, str]
    """The first name of each parameter, by all of its names."""
    sizes: Mapping[str, int]
    """Values of each parameter, by its first name."""

    def parameter_counts(self) -> tuple[int, ...]:
        """Parameters of each call's block; one met before is not counted again."""
        seen: set[str] = set()
        counts = []
        for block, _ in self.calls:
            new = {self.parameters[name] for name in self.names_in(block)} - seen
            seen |= new
            counts.append(sum(self.sizes[name] for name in new))
        return tuple(counts)

    def names_in(self, block: str) -> tuple[str, ...]:
        """Give the names of a block's parameters."""
        return tuple(name for name in self.parameters if name.startswith(f"{block}."))

    def live_bytes(self) -> tuple[int, ...]:
        """Give the bytes that would cross a cut before each call, in the mode that sends more."""
        return tuple(
            max(_crossing(of_mode, call, self.calls) for of_mode in self.recorded)
            for call in range(len(self.calls))
        )


def capture(
    model: nn.Module,
    example_inputs: Any,
    *,
    blocks: Sequence[str] | None = None,
    inputs: str = ROUTED,
) -> Captured:
    """Run a model on example inputs, and note its block calls and the values between them.

    The model may be on the meta device: nothing then needs memory.  Buffers, random states and
    modes are as before.

    Args:
        model: any module.
        example_inputs: what it is called with: a dict of keyword arguments, a tuple of positional
            ones, or a single value.
        blocks: patterns of names of modules that a cut may lie before; default: entries of lists.
        inputs: "first": the model's inputs are given to the first stage and travel on from there;
            "everywhere": every stage is given them.

    Raises:
        CutError: a pattern fits nothing; a tensor passes between blocks on a side way; there is no
            block.
        GlueError: the code between blocks cannot be followed.
    """
    if inputs not in (ROUTED, EVERYWHERE):
        raise CutError(f"inputs={inputs!r}; choose {ROUTED!r} or {EVERYWHERE!r}")
    watch_functions()
    args, kwargs = as_call(example_inputs)
    opened: list[type] = []
    while True:
        found = find_blocks(model, blocks, opened)
        if not found:
            raise CutError(f"{type(model).__name__} has no parameters, and so no blocks to cut at")
        try:
            return _capture(model, found, args, kwargs, inputs, opened)
        except SideChannel as error:
            kind = original_class(found[error.block])
            has_parts = any(True for _ in found[error.block].children())
            if blocks is not None or kind in opened or not has_parts:
                raise
            opened.append(kind)


def _capture(
    model: nn.Module,
    blocks: dict[str, nn.Module],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    inputs: str,
    opened: Sequence[type],
) -> Captured:
    watch(blocks.values())
    names = {id(module): name for name, module in blocks.items()}
    parameters = {id(p): name for name, p in model.named_parameters()}
    on_meta = any(p.is_meta for p in model.parameters())
    recordings = []
    for training in (True, False):
        recording = Recording(names, parameters, on_meta=on_meta)
        with _as_it_was(model, training=training), torch.no_grad():
            given = (args, kwargs)
            if inputs == ROUTED:
                given = routed(recording, args, kwargs)
                recording.note_inputs(recording.header[START])
            before = outer_state(model, blocks.values())
            recording.run(model, *given)
            check_unchanged(before, outer_state(model, blocks.values()))
        recordings.append((training, recording))
    calls = list(dict.fromkeys(c for _, r in recordings for c in calls_of(r.events)))
    if len(recordings) == 2:
        calls = _merged(*(calls_of(r.events) for _, r in recordings))
    return Captured(
        model,
        {name: blocks[name] for name in dict.fromkeys(name for name, _ in calls)},
        tuple(calls),
        tuple(Recorded(t, tuple(r.events), dict(r.infos)) for t, r in recordings),
        inputs,
        decides=any(event.decides for _, r in recordings for event in r.events),
        needs_all=any(r.needs_all for _, r in recordings),
        warnings=tuple(_warnings([r for _, r in recordings], opened)),
        parameters=_first_names(model),
        sizes={name: parameter.numel() for name, parameter in model.named_parameters()},
    )


def _first_names(model: nn.Module) -> dict[str, str]:
    first: dict[int, str] = {}
    return {
        name: first.setdefault(id(parameter), name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _merged(first: list[Call], second: list[Call]) -> list[Call]:
    """Put two orders together: what one mode leaves out stays where the other has it."""
    merged, known = list(first), set(first)
    for place, call in enumerate(second):
        if call not in known:
            before = second[place - 1] if place else None
            merged.insert(merged.index(before) + 1 if before in merged else 0, call)
            known.add(call)
    return merged


def _warnings(recordings: Sequence[Recording], opened: Sequence[type]) -> Iterator[str]:
    for kind in opened:
        yield f"{kind.__name__} was opened: a tensor leaves it on a side way"
    seen = set()
    for recording in recordings:
        for key, kind_name in recording.opaque:
            if (key.block, kind_name) not in seen:
                seen.add((key.block, kind_name))
                yield (
                    f"{key} returns a {kind_name}, which cannot cross stages: keep its users on "
                    "one stage"
                )


def _crossing(recorded: Recorded, cut: int, calls: Sequence[Call]) -> int:
    """Sum the bytes of values that are given before a call and used at it or later."""
    stage_of = {call: int(place >= cut) for place, call in enumerate(calls)}
    held = holders([recorded.events], stage_of, 2)
    return sum(recorded.infos[value].num_bytes for value, at in held.items() if at == (0, 1))


@contextmanager
def _as_it_was(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Run the model in one mode, and leave it as it was: modes, buffers, random states."""
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    with ExitStack() as after:
        after.enter_context(warnings.catch_warnings())  # of a checkpoint that sees no gradients
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
        after.callback(random.setstate, random.getstate())
        after.callback(numpy.random.set_state, numpy.random.get_state())
        after.callback(torch.set_rng_state, torch.get_rng_state())
        after.callback(_put_back, buffers)
        after.callback(put_back, attributes(model))
        if model.training != training:
            model.train(training)
        yield


def _put_back(buffers: Sequence[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)
