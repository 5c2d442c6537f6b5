"""Run a step as one CUDA graph: the executor's own run, captured once and replayed afterwards.

    first steps    eager: layers are learnt, libraries and memory are ready
    then           capture, after two steps of one key that drew alike; then the first replay
    later steps    replay

A graph does what it did when it was captured, so it holds for one `Key` only.  A step with another
key runs eagerly, until a graph of that key is captured.  Steps that no graph can do run eagerly
too, after one warning: a layer may ask the GPU for a number, for instance.

Between processes, all capture, replay or run eagerly alike: before each step they exchange the
numbers of their keys, and after a capture, whether it succeeded.  Replicas sum gradients after it.
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from penstock.errors import ConfigError, ExecutionWarning
from penstock.mesh import Mesh
from penstock.planner.plan import Plan
from penstock.types import Trace

from .drivers import AbstractDriver, CanCapture, Work
from .graphs import (
    Leaves,
    NotCaptured,
    Noted,
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
MOST_KEYS = 8
"""Keys without a graph that a process remembers."""
_UNUSUAL = -1
"""Number in the place of a key, of a step that is never captured."""
_Keys = tuple[int, ...]
"""The numbers of a step's keys, by process."""


def check_can_capture(plan: Plan, devices: Sequence[torch.device], mesh: Mesh) -> None:
    """Refuse plans whose step cannot be one graph.

    Raises:
        ConfigError: names what has to change.
    """
    connects, its = plan.transport.is_between_processes, mesh.placement
    others = [device for device in devices if device.type != "cuda"]
    is_shared = any(len(row) > 1 for rows in its.meshes for row in rows)
    names = ", ".join(sorted(set(map(str, devices))))
    reasons = {
        f"schedule={plan.schedule!r} updates the weights while it runs": (
            plan.schedule.is_asynchronous
        ),
        "offload moves activations to the host, which a graph cannot wait for": (
            any(plan.offloading)
        ),
        f"a stage is on {next(iter(others), None)}, which has no graphs": others,
        f"the stages of one process are on {names}": len(set(devices)) > 1,
        "several processes share a stage": connects and is_shared,
        f"the processes {list(its.idle)} have no stage": connects and its.idle,
    }
    why = next((reason for reason, holds in reasons.items() if holds), None)
    if why:
        raise ConfigError(
            f"cuda_graphs=True, and {why}. A graph runs all stages of a process on one GPU, with "
            'a synchronous schedule: give devices="cuda:0", or a mesh of processes with a GPU '
            "each, or leave cuda_graphs out"
        )
    if connects and _moves_segments():
        raise ConfigError(
            "cuda_graphs=True in several processes, and PYTORCH_CUDA_ALLOC_CONF has "
            "expandable_segments:True: NCCL takes each block of a graph's memory for one "
            "allocation. Leave that setting out, or set NCCL_GRAPH_REGISTER=0"
        )


def _moves_segments() -> bool:
    """Tell whether torch may map a block from several allocations, and NCCL register it whole."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    settings = ",".join(os.environ.get(name, "") for name in names)
    registers = os.environ.get("NCCL_GRAPH_REGISTER", "1") != "0"
    return registers and "expandable_segments:true" in settings.replace(" ", "").lower()


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


@dataclass(slots=True, eq=False)
class _Known:
    """A key of this process: its number, and what was noted alike in its `num_warm` steps."""

    number: int
    num_warm: int = 0
    noted: Noted = Noted()  # noqa: RUF009 - it is never changed


class GraphDriver(AbstractDriver):
    """Runs the ranks of this process, as a graph where there is one of the step's keys.

    A step's keys are the numbers of each process's key.  All processes of the mesh hold graphs of
    the same keys; None instead of one that could not be captured.  The end of the mesh closes it.
    """

    def __init__(self, eager: CanCapture, mesh: Mesh) -> None:
        self._eager, self._mesh, self._world = eager, mesh, mesh.world
        if mesh.processes is not None:
            mesh.processes.holders.add(self)
        self._known: dict[Key, _Known] = {}
        self._graphs: dict[_Keys, StepGraph | None] = {}
        self._num_eager = self._num_keys = 0
        self._has_warned = False

    def __reduce__(self) -> tuple[Any, ...]:
        return GraphDriver, (self._eager, self._mesh)  # a copied pipeline captures its own

    def close(self) -> None:
        """Free the graphs with their memory; later steps begin with warm-ups again."""
        self._graphs, self._known = {}, {}

    def drive(self, work: Work) -> None:
        # 1. Tell all processes this one's key, and in how many steps it was alike.
        leaves = Leaves.of(work.run)
        key = _key_of(work, leaves) if _is_usual(work.run) else None
        known = _Known(_UNUSUAL) if key is None else self._remembered(key)
        mine = torch.tensor([known.number, known.num_warm])
        told = self._world.tensors.all_gather(mine, "to choose a graph for this step")
        rows = [row.tolist() for row in told]
        keys: _Keys = tuple(number for number, _ in rows)
        if key is None or _UNUSUAL in keys:
            self._eager.drive(work)
            return
        # 2. Capture if all are warm; replay, and sum the gradients of replicas.
        if keys not in self._graphs and min(num_warm for _, num_warm in rows) >= WARM_UP:
            self._graphs[keys] = self._captured(key, known, work, leaves)
        graph = self._graphs.get(keys)
        if graph is None:
            self._run_eagerly(key, known, work)
        else:
            self._num_eager = 0
            graph.replay(work.run, leaves)
            for stage in work.stages.values():
                stage.reduce_after()

    def _remembered(self, key: Key) -> _Known:
        """Return what is known of a key, now the latest; forget old ones that have no graph."""
        known = self._known.pop(key, None)
        if known is None:
            known, self._num_keys = _Known(self._num_keys), self._num_keys + 1
        self._known[key] = known
        here = self._world.rank
        pinned = {keys[here] for keys, graph in self._graphs.items() if graph}
        loose = [key for key, known in self._known.items() if known.number not in pinned]
        for old in loose[:-MOST_KEYS]:
            gone = self._known.pop(old).number
            self._graphs = {k: graph for k, graph in self._graphs.items() if k[here] != gone}
        return known

    def _captured(self, key: Key, known: _Known, work: Work, leaves: Leaves) -> StepGraph | None:
        """Capture in all processes; None, after a warning, if one cannot."""
        why, graph = leaves.why_eager or _why_eager(work), None
        num_graphs = sum(graph is not None for graph in self._graphs.values())
        if not why and num_graphs == MOST_GRAPHS:
            changed = self._difference(key)
            why = f"there are {MOST_GRAPHS} graphs already; {changed} changed again"
        try:
            graph = None if why else StepGraph(self._eager, work, leaves, known.noted)
        except NotCaptured as error:
            why = str(error)
        reasons = self._world.gather(why, "for their captures of this step")
        first = next((rank for rank, reason in enumerate(reasons) if reason), None)
        if first is None:
            return graph
        self._eager.forget()
        is_here = first == self._world.rank
        self._warn(reasons[first] + ("" if is_here else f" (rank {first})"))
        return None

    def _run_eagerly(self, key: Key, known: _Known, work: Work) -> None:
        """Run as ever, and note what a graph of this key needs."""
        self._num_eager += 1
        if self._num_eager > MOST_EAGER:
            changed = self._difference(key)
            self._warn(f"{MOST_EAGER} steps have had no graph; {changed} changed")
        noting = work.run.generators = NotingGenerators()
        self._eager.drive(work)
        is_ready = not (noting.seeded or work.run.looks)
        noted = Noted(noting.calls, self._eager.messages())
        known.num_warm = is_ready * (known.num_warm * (noted == known.noted) + 1)
        known.noted = noted

    def _difference(self, key: Key) -> str:
        """Name the first facts of this process that differ from the last step with another key."""
        other = next((known for known in reversed(self._known) if known != key), None)
        return "a fact of another process" if other is None else key.difference(other)

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
    if any(stage.pools_statistics for stage in work.stages.values()):
        return "replicas pool the statistics of BatchNorm layers on the host"
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
