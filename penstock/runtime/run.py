"""One run of a schedule: what the step is, what each stage holds meanwhile, what comes out."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from penstock.planner.unsplit import Unsplit
from penstock.torch_private import AnyBatchNorm
from penstock.trace.timeline import MemorySample
from penstock.transport.channels import Activation, Gradient

from .caller import CallerContext
from .memory.stores import AbstractStore
from .microbatches import Batch
from .stage.tape import Tape
from .window import Window

Moments = tuple[int, Tensor, Tensor]
"""(values per channel, their mean, their unbiased variance): one call of one BatchNorm layer."""
MomentsByModule = dict[AnyBatchNorm, list[Moments]]


class LooksAside(Protocol):
    """Watches what stages share: `runtime.aside` does, which knows the run."""

    def look(self, run: "Run", tape: Tape) -> None:
        """Look at what is shared after the layers of a stage have run."""

    def end(self) -> None:
        """Look no more."""


class Streams(NamedTuple):
    """What keys the random streams of a run, beside layer and micro-batch.

    `first_microbatch` is what micro-batch 0 is called among those of all replicas.  A run of
    several mini-batches of `num_microbatches` each is as many steps, from `step` on.
    """

    seed: int
    phase: str
    step: int
    num_microbatches: int
    first_microbatch: int = 0


@dataclass(slots=True, eq=False)
class StageRun:
    """What one stage holds during one run: tapes by micro-batch, values by (micro-batch, peer).

    `tied_sums[peer]` are the gradients of another stage's weights that are not sent yet, by the
    place of the weight.  `kept_bytes` are the sizes of
    storages by micro-batch and address, where memory is traced.  `divided` has for each backward
    in two parts what it did not leave to the second, where the run `looks`.  `store` holds what
    is moved away.
    """

    tapes: dict[int, Tape] = field(default_factory=dict)
    arrived: dict[tuple[int, int], Activation] = field(default_factory=dict)
    arrived_gradients: dict[tuple[int, int], Gradient] = field(default_factory=dict)
    leaving: dict[tuple[int, int], Activation] = field(default_factory=dict)
    leaving_gradients: dict[tuple[int, int], Gradient] = field(default_factory=dict)
    kept_bytes: dict[int, dict[int, int]] = field(default_factory=dict)
    tied_sums: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    moments: MomentsByModule = field(default_factory=dict)
    divided: list[list[Unsplit]] = field(default_factory=list)
    has_claimed_leaves: bool = False
    store: AbstractStore | None = None


@dataclass(slots=True)
class Recorded:
    """What a traced run notes: times and bytes sent by rank, and the bytes that stages keep."""

    times_s: dict[int, list[float]] = field(default_factory=dict)
    sent_bytes: dict[int, list[int]] = field(default_factory=dict)
    memory: list[MemorySample] = field(default_factory=list)


@dataclass(slots=True, eq=False, kw_only=True)
class Run:
    """One step; a new one for every step, so that steps never mix.

    With `loss`, the last stage computes it and `losses[i]` holds the weighted, detached result of
    micro-batch i; without, `outputs[i]` holds the model's output, and `output_gradients[i]` what
    its backward starts from, once that is known.  `loss_scale` multiplies what backwards start
    from, and so all gradients, but not `losses`.

    `caller` is what the forwards run under: with gradients, if backwards will follow.  Once there
    are `output_gradients` the run has left it, and recomputes enter it again.

    With `trusts_evaluation`, layers in evaluation mode are taken to draw no random numbers until
    one is seen to.  With `sums_tied`, a stage sends its
    gradients of another one's weights once.  With `window` it is several mini-batches, whose
    micro-batches are numbered on, and the weights are updated meanwhile.  With `looks`, stages
    note which backwards in two parts are not.  `aside` watches what stages share.

    Shared by the stages: `has_seeded` tells that a layer was run with torch's default generators
    seeded, so that a checkpoint in it will bring them there again: backward passes then have them
    to themselves.  `claimed` maps the id of each leaf that some stage's backward reaches to that
    stage, and holds the leaf so that the id stays its own.
    """

    batch: Batch
    streams: Streams
    caller: CallerContext
    loss: Callable[..., Any] | None = None
    loss_scale: float = 1.0
    sums_tied: bool = False
    trusts_evaluation: bool = False
    output_gradients: list[list[Tensor | None]] | None = None
    window: Window | None = None
    looks: bool = False
    aside: LooksAside | None = None

    stages: dict[int, StageRun] = field(default_factory=dict)
    has_seeded: bool = False
    claimed: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    failure: BaseException | None = None

    losses: dict[int, Tensor] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    input_gradients: dict[int, tuple[Tensor | None, ...]] = field(default_factory=dict)
    recorded: Recorded = field(default_factory=Recorded)

    def fail(self, error: BaseException) -> None:
        """Remember the first exception; every rank stops at its next instruction."""
        if self.failure is None:
            self.failure = error
