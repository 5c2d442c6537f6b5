"""Run a step as one CUDA graph: the executor's own run, captured once and replayed afterwards.

    first steps    eager: layers are learnt, libraries and memory are ready
    then           capture, after two steps that ran alike; then the first replay
    later steps    replay

A graph does what it did when it was captured, so it holds for one `Key` only.  A step with another
key runs eagerly, until a graph of that key is captured.  Steps that no graph can do run eagerly
too, after one warning: a layer may ask the GPU for a number, for instance.
"""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import ConfigError, ExecutionWarning
from penstock.planner.plan import Plan
from penstock.types import Trace

from .drivers import AbstractDriver, CallerDriver, Work
from .graphs import (
    Leaves,
    NotCaptured,
    NotingGenerators,
    StepGraph,
    modules_of,
    parameters_of,
    plain_facts,
)
from .run import Run

WARM_UP = 2
"""Eager steps with one key before its graph is captured."""
MOST_GRAPHS = 4
"""Graphs of one pipeline; each keeps the memory of a step."""
MOST_EAGER = 16
"""Eager steps in a row, with keys that differ, before a warning says that nothing is captured."""


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


class Key(NamedTuple):
    """Facts of a step that its graph was captured with, by the names that warnings give them."""

    schedule: Any
    inputs: Any
    losses_without_weight: Any
    modes: Any
    attributes_of_modules: Any
    parameters_and_buffers: Any
    gradients: Any

    def difference(self, other: "Key") -> str:
        """Name the first facts that differ."""
        pairs = zip(self._fields, self, other, strict=True)
        return next((name for name, a, b in pairs if a != b), "nothing").replace("_", " ")


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
        leaves = Leaves.of(work.run)
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

    def _capture(self, key: Key, work: Work, leaves: Leaves) -> None:
        try:
            why = leaves.why_eager or _why_eager(work)
            if len(self._graphs) == MOST_GRAPHS:
                changed = key.difference(next(reversed(self._graphs)))
                why = why or f"there are {MOST_GRAPHS} graphs already; {changed} changed again"
            if why:
                raise NotCaptured(why)
            self._graphs[key] = StepGraph(self._eager, work, leaves, self._calls)
        except NotCaptured as error:
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


def _key_of(work: Work, leaves: Leaves) -> Key:
    """Return the facts on which the graph of a run depends."""
    run, parameters = work.run, parameters_of(work)
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
        tuple(weight == 0 for weight in run.batch.weights),
        modes,
        plain_facts(modules_of(work)),
        tuple((*_place(t), t.requires_grad) for t in (*parameters, *buffers)),
        tuple(_place(p.grad) for p in parameters),
    )


def _place(tensor: Tensor | None) -> tuple[Any, ...]:
    if tensor is None or tensor.layout is not torch.strided:
        return (None if tensor is None else tensor.layout,)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
