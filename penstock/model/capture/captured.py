"""A captured model as data: its block calls in order, and the values between them."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.errors import CaptureError, CutError
from penstock.model.pytree import flatten, with_new_containers
from penstock.model.state import first_names

from .blocks import Choice, Groups, check_hooks, check_modules, find_groups, ranges_of
from .containers import parts
from .events import START, Info, ValueId
from .forward_pass import Maker
from .inputs import (
    EVERYWHERE,
    ROUTED,
    Call,
    arguments_for,
    as_call,
    first_samples,
    names_of_positions,
)
from .outer_state import (
    OwnState,
    Writes,
    as_it_was,
    changed_outside,
    grad_mode_noted,
    new_settings,
    seeds_refused,
    set_again,
    slots_outside,
)
from .recording import Event, Recording, SideChannel, WroteOutside
from .routes import BlockCall, calls_of, holders, stages_of_events
from .watch import watch, watch_functions


class Mode(NamedTuple):
    """A mode of a recording: training or evaluation, with or without gradients."""

    training: bool
    with_grad: bool


_TRAINING = Mode(training=True, with_grad=True)
_EVALUATION = Mode(training=False, with_grad=False)
_OTHERS = (Mode(False, True), Mode(True, False))
"""The modes that are recorded too if the model's code asks for the gradient mode."""

_FEW = 2
"""Samples for all modes except training; with one sample, some copies look like their source."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The events of a recording in one mode, and the tensors in it."""

    events: tuple[Event, ...]
    infos: Mapping[ValueId, Info]


@dataclass(frozen=True, slots=True, eq=False)
class Captured:
    """A model, its blocks, and the events of its run on the example inputs.

    `calls` are the block calls in the order of execution.  `inputs` is "first" or "everywhere":
    the stages that get the model's inputs.  With `draws_between`, code between blocks draws from
    Python's or NumPy's global generator.  With `decides`, it does so or looks at values, and the
    model may take other paths.  With `differentiates`, it computes gradients of its own results.
    """

    model: nn.Module
    blocks: Mapping[str, nn.Module]
    calls: tuple[BlockCall, ...]
    recorded: tuple[Recorded, ...]
    inputs: str
    decides: bool
    draws_between: bool
    differentiates: bool
    needs_all: bool
    warnings: tuple[str, ...]
    parameters: Mapping[str, str]
    """The first name of each parameter, by each of its names."""
    sizes: Mapping[str, int]
    """Number of elements of each parameter, by its first name."""
    together: tuple[tuple[int, int], ...] = ()
    """First and last of the calls that stay on one stage; these ranges do not overlap."""
    keep: frozenset[str] = frozenset()
    """Blocks whose results are returned beside the output."""
    makers: frozenset[Maker] = frozenset()
    """Functions between blocks whose new tensors routed values are written into."""
    checked: str = "not checked"
    """The result of the comparison with the unsplit model, in a sentence."""

    def names_in(self, block: str) -> tuple[str, ...]:
        """Return the names of a block's parameters."""
        return tuple(name for name in self.parameters if name.startswith(f"{block}."))

    def live_bytes(self) -> tuple[int, ...]:
        """Return the bytes that would cross a cut before each call, in the mode with the most.

        They are the sizes of values that are made before the call and used at it or later.
        """
        most = []
        for cut in range(len(self.calls)):
            stage_of = {call: int(place >= cut) for place, call in enumerate(self.calls)}
            in_modes = []
            for mode in self.recorded:
                held = holders(stages_of_events(mode.events, stage_of, 2))
                crossing = (value for value, at in held.items() if at == (0, 1))
                in_modes.append(sum(mode.infos[value].num_bytes for value in crossing))
            most.append(max(in_modes))
        return tuple(most)


def record_model(
    model: nn.Module,
    example_inputs: Any,
    *,
    blocks: Sequence[str] | None = None,
    together: Sequence[str] | Sequence[Sequence[str]] | None = None,
    inputs: str = ROUTED,
    keep: Sequence[str] = (),
) -> Captured:
    """Run a model on example inputs, and record its block calls and the values between them.

    A model on the meta device needs no memory.  Buffers, random states and modes are restored.
    Arguments, CutErrors and GlueErrors are those of `capture`.
    """
    if inputs not in (ROUTED, EVERYWHERE):
        raise CutError(f"inputs={inputs!r}; choose {ROUTED!r} or {EVERYWHERE!r}")
    watch_functions()
    check_modules(model)
    call = as_call(example_inputs)
    # Each error of these classes names a block that has to be chosen otherwise: record again.
    choice = Choice(model, blocks)
    while True:
        found_blocks = choice.blocks()
        try:
            returned = find_groups(list(keep), found_blocks, "keep")
            groups, makers = find_groups(together, found_blocks), frozenset(choice.makers)
            names = frozenset(name for group in returned for name in group)
            recorder = _Recorder(model, found_blocks, inputs, groups, names, makers)
            recordings = recorder.in_modes(call)
            if choice.close_around_chosen(recordings.values()):
                continue
            captured = recorder.captured(recordings, choice)
            choice.check(captured.calls)
            return captured
        except SideChannel as error:
            choice.open(error)
        except OwnState as error:
            choice.close(error)
        except WroteOutside as error:
            choice.route(error)


@dataclass(frozen=True, slots=True)
class _Recorder:
    """Runs a model with these blocks in each mode, and records the events."""

    model: nn.Module
    blocks: dict[str, nn.Module]
    inputs: str
    groups: Groups
    keep: frozenset[str]
    makers: frozenset[Maker]

    def in_modes(self, whole: Call) -> dict[Mode, Recording]:
        """Run the model in each mode in which it may take another path.

        Training runs on the whole example, and the other modes on a few samples.  A mode in which
        blocks change lists runs twice: a list that is changed both times outlives the forward.
        """
        check_hooks(self.model, self.blocks.values())
        few = first_samples(whole, _FEW)
        recordings = {_TRAINING: self._in_mode(whole, _TRAINING)}
        for mode in (_EVALUATION, *_OTHERS):
            if mode in _OTHERS and not any(r.asks_for_grad for r in recordings.values()):
                break
            recordings[mode] = self._on_few(few, whole, mode)
        for mode, recording in recordings.items():
            if recording.filled:
                recording.check_not_kept(self._on_few(few, whole, mode))
        return recordings

    def _on_few(self, few: Any, whole: Call, mode: Mode) -> Recording:
        if few is not None:
            with suppress(Exception):  # a model may have a fixed batch size
                return self._in_mode(few, mode)
        try:
            return self._in_mode(whole, mode)
        except Exception as error:
            if isinstance(error, CaptureError) or mode.with_grad:
                raise
            runs_with_gradients = False
            with as_it_was(self.model, training=mode.training), suppress(Exception):
                args, kwargs = with_new_containers(whole)
                self.model(*args, **kwargs)
                runs_with_gradients = True
            if not runs_with_gradients:
                raise
            said = next(iter(str(error).splitlines()), "")
            raise CutError(
                f"{type(self.model).__name__} runs with gradients and not without, as eval_step "
                f"and evaluation run it: {type(error).__name__}: {said}. Put what needs them "
                "(torch.autograd.grad, say) into a block, under `with torch.enable_grad():`"
            ) from error

    def _in_mode(self, given: Call, mode: Mode) -> Recording:
        # 1. Run the model once, and find the settings that it has made.
        model, blocks = self.model, self.blocks.values()
        with as_it_was(model, training=mode.training), torch.set_grad_enabled(mode.with_grad):
            before = slots_outside(model, blocks)
            recording, writes = self._once(given)
            after = slots_outside(model, blocks)
            settings = new_settings(before, after)
            writes.check(self.groups, settings)
            if not settings:
                return recording
            # 2. Run it again: a setting is allowed if a later forward does not change it.
            with set_again(settings) as names:
                again, writes = self._once(given)
            writes.check(self.groups)
            names += [s.key for s in new_settings(after, slots_outside(model, blocks))]
            if names or again.events != recording.events:
                raise changed_outside("", settings[0].key)
        return again

    def _once(self, given: Call) -> tuple[Recording, Writes]:
        model, blocks = self.model, self.blocks
        parameters = {id(p): name for name, p in model.named_parameters()}
        on_meta = any(p.is_meta for p in model.parameters())
        recording = Recording(watch(blocks), parameters, on_meta=on_meta, together=self.groups)
        recording.keep, recording.routed_makers = self.keep, self.makers
        lists = (part for part in parts(given) if isinstance(part, list | deque))
        recording.has_lists = any(flatten(part)[0] for part in lists)
        given = arguments_for(recording, self.inputs, given, names_of_positions(model))
        if self.inputs == ROUTED:
            recording.note_inputs(recording.header[START])
        writes = Writes(model, blocks)
        with seeds_refused(), grad_mode_noted(), writes.noted(recording):
            recording.run(model, *given)
        return recording, writes

    def captured(self, recordings: dict[Mode, Recording], choice: Choice) -> Captured:
        model, modes = self.model, list(recordings.values())
        calls = calls_of(recording.events for recording in modes)
        draws = any(recording.draws_between for recording in modes)  # and may go by what it draws
        return Captured(
            model,
            {name: self.blocks[name] for name in dict.fromkeys(name for name, _ in calls)},
            tuple(calls),
            tuple(Recorded(tuple(r.events), dict(r.infos)) for r in modes),
            self.inputs,
            # The writes into an empty tensor, and the operations on a list of tensors, are often
            # as many as the samples, so that the path depends on the batch.
            decides=bool(self.makers)
            or draws
            or any(r.has_lists or any(e.decides for e in r.events) for r in modes),
            draws_between=draws,
            differentiates=any(recording.differentiates for recording in modes),
            needs_all=any(recording.needs_all for recording in modes),
            warnings=tuple(_warnings(modes, choice)),
            parameters=first_names(model.named_parameters(remove_duplicate=False)),
            sizes={name: parameter.numel() for name, parameter in model.named_parameters()},
            together=ranges_of(self.groups, calls),
            keep=self.keep,
            makers=self.makers,
        )


def _warnings(recordings: Sequence[Recording], choice: Choice) -> Iterator[str]:
    for kind in choice.closed:
        yield f"{kind.__name__} is a block: it keeps state of its own"
    for kind in choice.choosing:
        yield f"{kind.__name__} is a block: which of its parts it calls depends on values"
    for kind in choice.opened:
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
