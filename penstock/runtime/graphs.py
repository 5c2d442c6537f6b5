"""Capture a run of the executor as one CUDA graph, and replay it.

    capture    the run, of static inputs, with a generator for each layer call that draws
    replay     copy the batch and the weights of its losses ── seed the generators ── launch

`graph_driver` decides which steps are captured.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from penstock.model.pytree import Structure, constants, flatten, unflatten
from penstock.model.state import attributes, put_state, read_state

from .drivers import CanCapture, Work
from .random.streams import new_generator
from .run import Recorded, Run, StageRun, Streams

_PLAIN = (bool, int, float, str)


class NotCaptured(Exception):
    """A layer does what no graph can do; the text says what."""


# -- random numbers ------------------------------------------------------------------------------


class NotingGenerators:
    """Makes the generators of an eager step, and notes which layer calls drew."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, torch.device]] = []
        self.seeded: set[int] = set()

    def make(
        self, streams: Streams, layer: int, microbatch: int, where: torch.device
    ) -> Generator:
        """Return a new generator for one call of one layer."""
        self.calls.append((layer, microbatch, where))
        return new_generator(where).manual_seed(streams.key(layer, microbatch))

    def seed_default(self, layer: int) -> None:
        """Note that a layer runs with torch's default generators seeded."""
        self.seeded.add(layer)


class GraphGenerators:
    """The generators of one graph, one for each layer call that draws, in the order of draws."""

    def __init__(self, calls: Sequence[tuple[int, int, torch.device]]) -> None:
        self._calls, self._num_made = calls, 0
        self.generators = [new_generator(where) for *_, where in calls]

    def make(
        self, streams: Streams, layer: int, microbatch: int, where: torch.device
    ) -> Generator:
        """Return the next generator, while the graph is captured."""
        number, self._num_made = self._num_made, self._num_made + 1
        if where.type != "cuda":
            raise NotCaptured(f"layer {layer} draws random numbers on the CPU")
        if number >= len(self._calls) or self._calls[number] != (layer, microbatch, where):
            raise NotCaptured(f"layer {layer} draws random numbers in some steps only")
        return self.generators[number]

    def seed_default(self, layer: int) -> None:
        """Refuse a layer that needs torch's default generators seeded."""
        raise NotCaptured(
            f"layer {layer} draws random numbers outside torch's operators, or in a checkpoint"
        )

    def seed(self, streams: Streams) -> None:
        """Seed for a step: the next replay draws what that step would draw eagerly."""
        for (layer, microbatch, _), generator in zip(self._calls, self.generators, strict=True):
            generator.manual_seed(streams.key(layer, microbatch))


# -- one graph -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Leaves:
    """The tensors of a batch, and its structure."""

    tensors: list[Tensor]
    structure: Structure

    @classmethod
    def of(cls, run: Run) -> "Leaves":
        return cls(*flatten((run.batch.inputs, run.batch.targets)))

    @property
    def key(self) -> Any:
        places = self._places
        of_tensors = [(*place[1:], places.index(place)) for place in places]
        return tuple(of_tensors), repr(self.structure)

    @property
    def why_eager(self) -> str:
        """Say why these tensors cannot be copied into static ones; "" if they can."""
        if any(t.requires_grad for t in self.tensors):
            return "the inputs require gradients"
        if any(type(t) is not Tensor or t.layout is not torch.strided for t in self.tensors):
            return "the inputs are no plain tensors"
        if any(0 in t.stride() and t.numel() > 1 for t in self.tensors):
            return "the inputs repeat values without a copy (expand)"
        if any(not isinstance(c, (*_PLAIN, type(None))) for c in constants(self.structure)):
            return "the batch holds values that are neither tensors nor numbers nor texts"
        places = {(t.data_ptr(), t.device) for t in self.tensors}
        return "" if len(places) == len(set(self._places)) else "the inputs share memory"

    @property
    def _places(self) -> list[Any]:
        """Say where each tensor is: the same tensor may be there twice, as a text's next words."""
        return [(t.data_ptr(), t.device, t.dtype, t.size(), t.stride()) for t in self.tensors]

    def static(self, device: torch.device) -> "Leaves":
        """Return copies on the GPU for the graph to read; one tensor twice stays one."""
        new: dict[Any, Tensor] = {}
        for place, t in zip(self._places, self.tensors, strict=True):
            if place not in new:
                empty = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=device)
                new[place] = empty.copy_(t)
        return Leaves([new[place] for place in self._places], self.structure)


class Noted(NamedTuple):
    """The layer calls that drew in an eager step, and its messages, by the driver's own words."""

    calls: Sequence[Any] = ()
    messages: Any = None


class StepGraph:
    """The graph of a step's run, with the tensors that it reads and writes.

    Holds the memory of a step: its activations, the static inputs, and gradients that the step
    made new.  These are in `.grad` until the next step with this graph writes others there.  If
    replicas sum them, `.grad` has copies: these may be kept for a sum with those of a later step.
    """

    def __init__(self, driver: CanCapture, work: Work, leaves: Leaves, noted: "Noted") -> None:
        """Capture the run of `work`; nothing of it has run afterwards.

        Raises:
            NotCaptured: the run does what no graph can do; all is as it was before.
        """
        devices = [stage.device for stage in work.stages.values()]
        weights, where = work.run.batch.weights, devices[0].device
        self._inputs = leaves.static(where)
        self._loss_gradients = torch.ones(len(weights), dtype=torch.float64, device=where)
        self._random = GraphGenerators(noted.calls)
        self._stream = torch.cuda.Stream(where)
        self._graph = torch.cuda.CUDAGraph()
        for generator in self._random.generators:
            self._graph.register_generator_state(generator)
        inputs, targets = unflatten(self._inputs.structure, self._inputs.tensors)
        run = replace(
            work.run,
            batch=replace(
                work.run.batch,
                inputs=inputs,
                targets=targets,
                weights=[float(weight != 0) for weight in weights],
            ),
            loss_gradients=self._loss_gradients.unbind(),
            stages={index: StageRun() for index in work.stages},
            claimed={},
            losses={},
            outputs={},
            input_gradients={},
            recorded=Recorded(),
            generators=self._random,
        )

        def capture() -> None:
            mode = {"stream": self._stream, "capture_error_mode": "thread_local"}
            with torch.cuda.graph(self._graph, **mode):  # type: ignore[arg-type]
                for device in devices:
                    device.wait_for_caller()
                driver.drive_captured(replace(work, run=run), noted.messages)
                for device in devices:
                    device.make_caller_wait()

        parameters = parameters_of(work)
        self._gradients = _without_traces(capture, modules_of(work), parameters)
        self._sums = any(stage.sums_gradients for stage in work.stages.values())
        self._losses = run.losses
        self._schedule = work.schedule  # a key has its address, which no other may take

    def replay(self, run: Run, leaves: Leaves) -> None:
        """Run the step of `run` on the caller's current stream; leave losses and gradients."""
        for static, given in zip(self._inputs.tensors, leaves.tensors, strict=True):
            static.copy_(given, non_blocking=True)
        self._loss_gradients.copy_(torch.tensor(run.loss_gradients, dtype=torch.float64))
        self._random.seed(run.streams)
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient.clone() if self._sums else gradient
        run.losses = {i: loss * run.batch.weights[i] for i, loss in self._losses.items()}


def _without_traces(
    capture: Callable[[], None], modules: Sequence[nn.Module], parameters: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """Capture; put gradients back, and the modules' state if that fails.

    Returns:
        The parameters with the gradients that a replay writes.

    Raises:
        NotCaptured: the capture failed, or a layer assigns state, which a replay would not.
    """
    gradients = [p.grad for p in parameters]
    state, facts = read_state(modules, attributes(modules)), plain_facts(modules)
    why = ""
    try:
        capture()
    except Exception as error:
        first = _first(error)
        why = f"{type(first).__name__}: {first}"
    after = read_state(modules, attributes(modules))
    changed = [place for place, tensor in after.items() if state.get(place) is not tensor]
    if changed:
        put_state(state)
        module, _, name = changed[0]
        why = why or f"a {type(module).__name__} assigns {name!r} anew in its forward"
    if not why and plain_facts(modules) != facts:
        why = "a layer changes a number or a text among its attributes"
    kept = list(zip(parameters, gradients, strict=True))
    if not why and any(before is not None and p.grad is not before for p, before in kept):
        why = "a backward replaces a gradient instead of adding to it"
    written = [(p, p.grad) for p in parameters if p.grad is not None]
    for parameter, gradient in kept:  # another process may fail, and then nothing is replayed
        parameter.grad = gradient
    if why:
        raise NotCaptured(why)
    return written


def _first(error: BaseException) -> BaseException:
    """Return the first of several errors: the end of a failed capture raises another."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def plain_facts(modules: Sequence[nn.Module]) -> tuple[Any, ...]:
    """Return the plain values among the attributes of modules: `training`, `p`, and the like."""
    return tuple(tuple(_plain(vars(module).items())) for module in modules)


def _plain(items: Any) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in items if isinstance(value, _PLAIN))


def modules_of(work: Work) -> list[nn.Module]:
    owned = [stage.weights.owned.everyone for stage in work.stages.values()]
    return list(dict.fromkeys(module for modules in owned for module in modules))


def parameters_of(work: Work) -> list[Tensor]:
    owned = [stage.weights.owned.parameters for stage in work.stages.values()]
    return list(dict.fromkeys(p for parameters in owned for p in parameters))
