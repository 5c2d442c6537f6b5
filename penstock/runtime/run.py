"""One run of a schedule: what goes in, what is kept on the way, what comes out."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from penstock.model.entries import Entry
from penstock.model.stage_plan import Step
from penstock.trace.timeline import MemorySample
from penstock.transport.payload import Activation, Gradient
from penstock.types import Trace

from .batch_norm import MomentsByModule
from .caller import CallerContext
from .recompute import Seen, Witness

StagePair = tuple[int, int]
"""(stage, micro-batch)."""

FROM_CALLER = -1
"""Stands where a peer stage stands, for values that come from the caller's batch."""


class Given(NamedTuple):
    """A tensor given to the layers: where from, its version then, whether it is a copy.

    `before` is what an alias held in an evaluation.
    """

    key: tuple[int, int]
    tensor: Tensor
    version: int
    copied: bool
    is_alias: bool
    sent: Tensor
    before: Tensor | None


@dataclass(slots=True)
class Kept:
    """What a stage keeps of one micro-batch between forward and backward.

    `graph_dropped`: the forward kept no graph, and a recompute will build it.
    `reruns_in_backward`: the backward may run layers again, inside a checkpoint of the user's own.
    With `draws_again` these draw the numbers again that they drew; with `must_not_draw` one of
    them could not.
    `witness`: a result of a forward that will be recomputed, to compare with.
    """

    received: dict[int, Activation]
    graph_dropped: bool = False
    reruns_in_backward: bool = False
    draws_again: bool = False
    must_not_draw: bool = False
    witness: Witness | None = None
    entries: dict[int, list[Entry]] = field(default_factory=dict)
    exported: dict[int, list[Tensor]] = field(default_factory=dict)
    output: list[Tensor] = field(default_factory=list)
    output_wants_grad: tuple[bool, ...] = ()
    loss: Tensor | None = None
    seen: Seen | None = None
    layer_marks: list[tuple[int, Step]] = field(default_factory=list)

    @property
    def inputs(self) -> list[Tensor]:
        """All tensors that the stage received."""
        return [leaf for activation in self.received.values() for leaf in activation.leaves]

    @property
    def entry_tensors(self) -> list[Tensor]:
        """The leaves of the stage's own graph that stand for what it received."""
        return [entry.tensor for entries in self.entries.values() for entry in entries]

    @property
    def results(self) -> list[Tensor]:
        """All that the forward gave."""
        exported = [leaf for leaves in self.exported.values() for leaf in leaves]
        return [*exported, *self.output, *([] if self.loss is None else [self.loss])]


@dataclass(slots=True, eq=False)
class Run:
    """Everything one step reads and writes; a new one for every step, so that steps never mix.

    `inputs[i]` and `targets[i]` belong to micro-batch i.  With `loss`, the last stage computes it
    and `losses[i]` holds the weighted, detached result; without, `outputs[i]` holds the model's
    output and `output_gradients[i]` what its backward starts from.  `loss_scale` multiplies what
    backwards start from, and so all gradients, but not `losses`.

    `caller` is what the forwards run under; a `resumed` run has left it, and enters it again for
    its recomputes.  With `trusts_evaluation`, layers in evaluation mode are taken to draw no
    random numbers until one is seen to.  `has_seeded` tells that a layer was run with torch's
    default generators seeded, so that a checkpoint in it will bring them there again: backward
    passes then have them to themselves.  `claimed` maps the id of each leaf that some stage's
    backward reaches to that stage, and holds the leaf so that the id stays its own.
    `first_microbatch` is what micro-batch 0 is called among those of all replicas, for the random
    streams.  With `sums_tied`, a stage sends its gradients of another one's weights once:
    `tied_sums[stage, peer]` are those not sent yet, by the place of the weight.
    """

    inputs: list[Any]
    loss: Callable[..., Any] | None
    caller: CallerContext
    phase: str
    step: int
    seed: int
    trace: Trace = Trace.OFF
    resumed: bool = False
    trusts_evaluation: bool = False
    has_seeded: bool = False
    first_microbatch: int = 0
    sums_tied: bool = False
    targets: list[Any] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    loss_scale: float = 1.0
    failure: BaseException | None = None
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)
    output_gradients: list[list[Tensor | None]] = field(default_factory=list)
    input_gradients: dict[int, tuple[Tensor | None, ...]] = field(default_factory=dict)
    kept: dict[StagePair, Kept] = field(default_factory=dict)
    arrived: dict[StagePair, dict[int, Activation]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    arrived_gradients: dict[StagePair, dict[int, Gradient]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    leaving: dict[StagePair, dict[int, Activation]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    leaving_gradients: dict[StagePair, dict[int, Gradient]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    claimed: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    stages_claimed: set[int] = field(default_factory=set)
    tied_sums: dict[StagePair, dict[int, Tensor]] = field(
        default_factory=lambda: defaultdict(dict)
    )
    moments: dict[int, MomentsByModule] = field(default_factory=lambda: defaultdict(dict))
    times_s: dict[int, list[float]] = field(default_factory=dict)
    sent_bytes: dict[int, list[int]] = field(default_factory=dict)
    memory: list[MemorySample] = field(default_factory=list)
    kept_bytes: dict[StagePair, dict[int, int]] = field(default_factory=lambda: defaultdict(dict))

    @property
    def with_grad(self) -> bool:
        """Whether backward passes will follow."""
        return self.caller.with_grad

    def loss_gradient(self, microbatch: int) -> float:
        """Give what the backward of a micro-batch's loss starts from."""
        return self.weights[microbatch] * self.loss_scale

    def fail(self, error: BaseException) -> None:
        """Remember the first exception; every rank stops at its next instruction."""
        if self.failure is None:
            self.failure = error
