"""The state of one run of a schedule: its batch, the values on each stage, its results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Generator, Tensor, device

from penstock.planner.unsplit import Unsplit
from penstock.torch_private import AnyBatchNorm
from penstock.trace.timeline import MemoryKind, MemorySample
from penstock.transport.channels import Activation, Gradient

from .caller import CallerContext
from .memory.stores import AbstractStore
from .microbatches import Batch
from .random.streams import stream_key
from .stage.tape import Tape
from .window import Window

Moments = tuple[int, Tensor, Tensor]
"""(values per channel, their mean, their unbiased variance): one call of one BatchNorm layer."""
MomentsByModule = dict[AnyBatchNorm, list[Moments]]


class LooksAside(Protocol):
    """The interface of `runtime.aside`, which watches state that stages share."""

    def look(self, run: "Run", tape: Tape) -> None:
        """Compare the shared state after the layers of a stage have run."""

    def end(self) -> None:
        """Stop watching."""


class Streams(NamedTuple):
    """The keys of a run's random streams, beside layer and micro-batch.

    `first_microbatch` is the number of micro-batch 0 among those of all replicas.  A run of
    several mini-batches, of `num_microbatches` each, counts as several steps, from `step` on.
    """

    seed: int
    phase: str
    step: int
    num_microbatches: int
    first_microbatch: int = 0

    def key(self, layer: int, microbatch: int) -> int:
        """Return the seed for one call of one layer; `microbatch` counts those of the run."""
        later, microbatch = divmod(microbatch, self.num_microbatches)
        first = self.first_microbatch
        return stream_key(self.seed, self.phase, self.step + later, layer, first + microbatch)


class MakesGenerators(Protocol):
    """The interface of `runtime.graphs`, which needs the generators of a step beforehand."""

    def make(self, streams: Streams, layer: int, microbatch: int, where: device) -> Generator:
        """Return the generator for one call of one layer, in the state of its first draw."""

    def seed_default(self, layer: int) -> None:
        """Note that a layer runs with torch's default generators seeded."""


@dataclass(slots=True, eq=False)
class StageRun:
    """The values on one stage during a run: tapes by micro-batch, messages by (micro-batch, peer).

    `tied_sums[peer]` are sums of gradients of another stage's weights, not sent yet, by place.
    `kept_bytes` are bytes of storages by micro-batch and address, and `last_bytes` those of each
    kind when last recorded, if memory is traced.  `divided` has the weight gradients that split
    backwards did not defer, and why, if the run `looks`.  `store` holds offloaded values.
    """

    tapes: dict[int, Tape] = field(default_factory=dict)
    arrived: dict[tuple[int, int], Activation] = field(default_factory=dict)
    arrived_gradients: dict[tuple[int, int], Gradient] = field(default_factory=dict)
    leaving: dict[tuple[int, int], Activation] = field(default_factory=dict)
    leaving_gradients: dict[tuple[int, int], Gradient] = field(default_factory=dict)
    kept_bytes: dict[int, dict[int, int]] = field(default_factory=dict)
    last_bytes: dict[MemoryKind, int] = field(default_factory=dict)
    tied_sums: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    moments: MomentsByModule = field(default_factory=dict)
    divided: list[list[Unsplit]] = field(default_factory=list)
    has_claimed_leaves: bool = False
    store: AbstractStore | None = None


@dataclass(slots=True)
class Recorded:
    """The raw record of a traced run: times and bytes sent by rank, and activation memory."""

    times_s: dict[int, list[float]] = field(default_factory=dict)
    sent_bytes: dict[int, list[int]] = field(default_factory=dict)
    memory: list[MemorySample] = field(default_factory=list)


@dataclass(slots=True, eq=False, kw_only=True)
class Run:
    """The state of one step; each step has a new one, so that steps never mix.

    With `loss`, the last stage computes it, and `losses[i]` is the weighted, detached loss of
    micro-batch i.  Without, `outputs[i]` is the model's output, and `output_gradients[i]` its
    gradient, once that is known.  `loss_gradients[i]` is the gradient of loss i.

    `caller` has the modes of the forwards.  Once there are `output_gradients` the run has left
    these modes, and recomputes enter them again.

    `trusts_evaluation`: layers in evaluation mode count as drawing no random numbers until one
    does.  `sums_tied`: a stage sends its gradients of another stage's weights once.
    `gradient_dtype`: gradients of weights of lower precision have this dtype.  `window`: the run
    has several mini-batches, and updates the weights in between.  `looks`: stages note why
    backwards in two parts are whole.  `aside` watches state that stages share.
    `generators` makes the generators of layer calls.  `is_alone`: one thread runs all stages.

    The stages share the rest.  `has_seeded`: a layer ran with torch's default generators seeded.
    A checkpoint in it will set them again, so backward passes need them alone.  `claimed` maps the
    id of each leaf that a backward reaches to its stage, and holds the leaf to keep the id valid.
    """

    batch: Batch
    streams: Streams
    caller: CallerContext
    loss: Callable[..., Any] | None = None
    loss_gradients: Sequence[float | Tensor] = ()
    sums_tied: bool = False
    gradient_dtype: str | None = None
    trusts_evaluation: bool = False
    output_gradients: list[list[Tensor | None]] | None = None
    window: Window | None = None
    looks: bool = False
    aside: LooksAside | None = None
    generators: MakesGenerators | None = None
    is_alone: bool = False

    stages: dict[int, StageRun] = field(default_factory=dict)
    has_seeded: bool = False
    claimed: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    failure: BaseException | None = None

    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    input_gradients: dict[int, tuple[Tensor | None, ...]] = field(default_factory=dict)
    recorded: Recorded = field(default_factory=Recorded)

    def fail(self, error: BaseException) -> None:
        """Keep the first exception; all ranks stop at their next instruction."""
        if self.failure is None:
            self.failure = error
