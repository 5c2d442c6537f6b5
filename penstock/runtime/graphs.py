"""Run a step as one CUDA graph: the executor's own run, captured once and replayed afterwards.

    step 0, 1      eager: layers are learnt, libraries and memory are ready
    step 2         capture: the same run, of static inputs; then the first replay
    later steps    copy the batch into the static inputs ── seed the generators ── replay

A graph does what it did when it was captured, so it holds for one `Key` only.  A step with another
key runs eagerly, until a graph of that key is captured.  What no graph can do, such as a layer
that asks the GPU for a number, runs eagerly too, after one warning.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from penstock.errors import ConfigError, ExecutionWarning
from penstock.model.pytree import Structure, constants, flatten, unflatten
from penstock.model.state import attributes, put_state, read_state
from penstock.planner.plan import Plan
from penstock.types import Trace

from .drivers import AbstractDriver, CallerDriver, Work
from .random.streams import new_generator
from .run import Recorded, Run, StageRun, Streams

WARM_UP = 2
"""Eager steps with one key before its graph is captured."""
MOST_GRAPHS = 4
"""Graphs of one pipeline; each keeps the memory of a step."""
MOST_EAGER = 16
"""Eager steps in a row, with keys that differ, before a warning says that nothing is captured."""
_PLAIN = (bool, int, float, str)


def check_can_capture(plan: Plan, devices: Sequence[torch.device]) -> None:
    """Refuse plans whose step cannot be one graph.

    Raises:
        ConfigError: names what has to change.
    """
    why = ""
    if plan.transport.is_between_processes:
        why = "the stages are in several processes"
    elif plan.schedule.is_asynchronous:
        why = f"schedule={plan.schedule!r} updates the weights while it runs"
    elif any(plan.offloading):
        why = "offload moves activations to the host, which a graph cannot wait for"
    elif any(device.type != "cuda" for device in devices):
        why = f"a stage is on {next(d for d in devices if d.type != 'cuda')}, which has no graphs"
    elif len(set(devices)) > 1:
        why = f"the stages are on {', '.join(sorted(set(map(str, devices))))}"
    if why:
        raise ConfigError(
            f"cuda_graphs=True, and {why}. One graph runs all stages on one GPU in one process: "
            'give devices="cuda:0" and a synchronous schedule, or leave cuda_graphs out'
        )


class _NotCaptured(Exception):  # noqa: N818 - never leaves this module
    """A layer does what no graph can do; the text says what."""


class Key(NamedTuple):
    """Facts of a step that its graph was captured with, by the names that warnings give them."""

    schedule: Any
    inputs: Any
    weights_of_losses: Any
    modes: Any
    attributes_of_modules: Any
    parameters_and_buffers: Any
    gradients: Any

    def difference(self, other: "Key") -> str:
        """Name the first facts that differ."""
        pairs = zip(self._fields, self, other, strict=True)
        return next((name for name, a, b in pairs if a != b), "nothing").replace("_", " ")


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
            raise _NotCaptured(f"layer {layer} draws random numbers on the CPU")
        if number >= len(self._calls) or self._calls[number] != (layer, microbatch, where):
            raise _NotCaptured(f"layer {layer} draws random numbers in some steps only")
        return self.generators[number]

    def seed_default(self, layer: int) -> None:
        """Refuse a layer that needs torch's default generators seeded."""
        raise _NotCaptured(
            f"layer {layer} draws random numbers outside torch's operators, or in a checkpoint"
        )

    def seed(self, streams: Streams) -> None:
        """Seed for a step: the next replay draws what that step would draw eagerly."""
        for (layer, microbatch, _), generator in zip(self._calls, self.generators, strict=True):
            generator.manual_seed(streams.key(layer, microbatch))


# -- one graph -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Leaves:
    """The tensors of a batch, and its structure."""

    tensors: list[Tensor]
    structure: Structure

    @classmethod
    def of(cls, run: Run) -> "_Leaves":
        return cls(*flatten((run.batch.inputs, run.batch.targets)))

    @property
    def key(self) -> Any:
        of_tensors = [(t.shape, t.stride(), t.dtype, t.device) for t in self.tensors]
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
        return "" if len(places) == len(self.tensors) else "the inputs share memory"

    def static(self, device: torch.device) -> "_Leaves":
        """Return tensors on the GPU for the graph to read, with no values yet."""
        new = [
            torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=device)
            for t in self.tensors
        ]
        return _Leaves(new, self.structure)


class StepGraph:
    """The graph of a step's run, with the tensors that it reads and writes.

    Holds the memory of a step: its activations, the static inputs, and gradients that the step
    made new.  These are in `.grad` until the next step with this graph writes others there.
    """

    def __init__(
        self, driver: AbstractDriver, work: Work, leaves: _Leaves, calls: Sequence[Any]
    ) -> None:
        """Capture the run of `work`; nothing of it has run afterwards.

        Raises:
            _NotCaptured: the run does what no graph can do; all is as it was before.
        """
        devices = [stage.device for stage in work.stages.values()]
        self._inputs = leaves.static(devices[0].device)
        self._random = GraphGenerators(calls)
        self._stream = torch.cuda.Stream(devices[0].device)
        self._graph = torch.cuda.CUDAGraph()
        for generator in self._random.generators:
            self._graph.register_generator_state(generator)
        inputs, targets = unflatten(self._inputs.structure, self._inputs.tensors)
        run = replace(
            work.run,
            batch=replace(work.run.batch, inputs=inputs, targets=targets),
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
                driver.drive(replace(work, run=run))
                for device in devices:
                    device.make_caller_wait()

        parameters = _parameters(work)
        _without_traces(capture, _modules(work), parameters)
        self._gradients = [(p, p.grad) for p in parameters if p.grad is not None]
        self._losses = run.losses

    def replay(self, run: Run, leaves: _Leaves) -> None:
        """Run the step of `run` on the caller's current stream; leave losses and gradients."""
        for static, given in zip(self._inputs.tensors, leaves.tensors, strict=True):
            static.copy_(given, non_blocking=True)
        self._random.seed(run.streams)
        self._graph.replay()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        run.losses = {i: loss.clone() for i, loss in self._losses.items()}


def _without_traces(
    capture: Callable[[], None], modules: Sequence[nn.Module], parameters: Sequence[Tensor]
) -> None:
    """Capture; put gradients and the modules' state back if that fails.

    Raises:
        _NotCaptured: the capture failed, or a layer assigns state, which a replay would not.
    """
    gradients = [p.grad for p in parameters]
    state, facts = read_state(modules, attributes(modules)), _facts(modules)
    why = ""
    try:
        capture()
    except Exception as error:  # noqa: BLE001 - the eager run that follows raises what is the user's
        first = _first(error)
        why = f"{type(first).__name__}: {first}"
    after = read_state(modules, attributes(modules))
    changed = [place for place, tensor in after.items() if state.get(place) is not tensor]
    if changed:
        put_state(state)
        module, _, name = changed[0]
        why = why or f"a {type(module).__name__} assigns {name!r} anew in its forward"
    if not why and _facts(modules) != facts:
        why = "a layer changes a number or a text among its attributes"
    kept = zip(parameters, gradients, strict=True)
    if not why and any(before is not None and p.grad is not before for p, before in kept):
        why = "a backward replaces a gradient instead of adding to it"
    if why:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        raise _NotCaptured(why)


def _first(error: BaseException) -> BaseException:
    """Return the first of several errors: the end of a failed capture raises another."""
    while error.__context__ is not None:
        error = error.__context__
    return error


# -- the driver ----------------------------------------------------------------------------------


class GraphDriver(AbstractDriver):
    """Runs all ranks in the calling thread, as a graph where there is one of the step's key."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._eager = CallerDriver(num_threads)
        self._graphs: dict[Key, StepGraph] = {}
        self._refused: set[Key] = set()
        self._last: Key | None = None
        self._num_same = self._num_eager = 0
        self._calls: Sequence[Any] = ()
        self._has_warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphDriver, (self._num_threads,)  # a copied pipeline captures its own

    def drive(self, work: Work) -> None:
        if not _is_usual(work.run):
            self._eager.drive(work)
            return
        leaves = _Leaves.of(work.run)
        key = _key_of(work, leaves)
        if key not in self._graphs and self._is_due(key):
            self._capture(key, work, leaves)
        if key in self._graphs:
            self._num_eager = 0
            self._graphs[key].replay(work.run, leaves)
        else:
            self._run_eagerly(key, work)

    def _is_due(self, key: Key) -> bool:
        """Tell whether the last steps were warm-ups of this key."""
        return key == self._last and self._num_same >= WARM_UP and key not in self._refused

    def _capture(self, key: Key, work: Work, leaves: _Leaves) -> None:
        try:
            why = leaves.why_eager or _why_eager(work)
            if self._calls:  # generators of a graph are not shown to have eager's bits yet
                why = why or "layers draw random numbers, which graphs do not yet do"
            if len(self._graphs) == MOST_GRAPHS:
                changed = key.difference(next(reversed(self._graphs)))
                why = why or f"there are {MOST_GRAPHS} graphs already; {changed} changed again"
            if why:
                raise _NotCaptured(why)
            self._graphs[key] = StepGraph(self._eager, work, leaves, self._calls)
        except _NotCaptured as error:
            self._refused.add(key)
            self._warn(str(error))

    def _run_eagerly(self, key: Key, work: Work) -> None:
        """Run as ever, and note what a graph of this key needs."""
        self._num_eager += 1
        if self._num_eager > MOST_EAGER and self._last is not None:
            self._warn(
                f"{MOST_EAGER} steps have had no graph; {key.difference(self._last)} changed"
            )
        noting = work.run.generators = NotingGenerators()
        self._eager.drive(work)
        is_ready = not (noting.seeded or work.run.looks)
        is_same = key == self._last and list(self._calls) == noting.calls
        self._num_same = is_ready * (self._num_same * is_same + 1)
        self._last, self._calls = key, noting.calls

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"cuda_graphs=True, and a step runs eagerly: {why}. Results are the same, and "
                "slower; such steps give no further warning",
                ExecutionWarning,
                stacklevel=6,
            )


def _is_usual(run: Run) -> bool:
    """Tell whether a run is a training step that is neither traced, profiled nor uneven."""
    sizes = run.batch.sizes
    trains = run.loss is not None and run.caller.with_grad and run.window is None
    return (
        trains
        and run.batch.trace is Trace.OFF
        and not run.caller.bound
        and len(set(sizes)) == 1
        and len(sizes) == run.streams.num_microbatches
    )


def _why_eager(work: Work) -> str:
    """Say why no graph can do a run; "" if nothing is known."""
    if any(stage.weights.are_hooked for stage in work.stages.values()):
        return "a hook on a parameter's gradient would not run"
    if any(stage.plan.draws_between for stage in work.stages.values()):
        return "code between layers draws from Python's or NumPy's global generator"
    return "" if work.run.aside is None else "stages share state"


def _key_of(work: Work, leaves: _Leaves) -> Key:
    """Return the facts on which the graph of a run depends."""
    run, parameters = work.run, _parameters(work)
    buffers = [b for stage in work.stages.values() for b in stage.weights.owned.buffers]
    matmul: Any = torch.backends.cuda.matmul
    modes = (
        run.caller.autocasts,
        run.caller.device,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.cudnn.deterministic,
        torch.backends.cudnn.benchmark,
        torch.backends.cudnn.allow_tf32,
        matmul.allow_tf32,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )
    return Key(
        id(work.schedule),
        leaves.key,
        (tuple(run.batch.weights), run.loss_scale),
        modes,
        _facts(_modules(work)),
        tuple((*_place(t), t.requires_grad) for t in (*parameters, *buffers)),
        tuple(_place(p.grad) for p in parameters),
    )


def _place(tensor: Tensor | None) -> tuple[Any, ...]:
    if tensor is None or tensor.layout is not torch.strided:
        return (None if tensor is None else tensor.layout,)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _facts(modules: Sequence[nn.Module]) -> tuple[Any, ...]:
    """Return the plain values among the attributes of modules: `training`, `p`, and the like."""
    return tuple(tuple(_plain(vars(module).items())) for module in modules)


def _plain(items: Any) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in items if isinstance(value, _PLAIN))


def _modules(work: Work) -> list[nn.Module]:
    owned = [stage.weights.owned.everyone for stage in work.stages.values()]
    return list(dict.fromkeys(module for modules in owned for module in modules))


def _parameters(work: Work) -> list[Tensor]:
    owned = [stage.weights.owned.parameters for stage in work.stages.values()]
    return list(dict.fromkeys(p for parameters in owned for p in parameters))
