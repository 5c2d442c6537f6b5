"""The instruction set: every schedule is written in it, and nothing else runs.

Printing an instruction gives its word in a schedule's text; `WORDS` reads it.
Letters in the "Roughly" lines: s a stage, i a micro-batch, x its input values, y its outputs, g
gradients.  kept[s, i] are the activations that a forward leaves for its backward.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import ClassVar, get_args

Message = tuple[bool, int, int, int]
"""(is a gradient, from stage, to stage, micro-batch): the key of a send and its receive."""


@dataclass(frozen=True, slots=True)
class OfStage:
    """An instruction of a stage: once a mini-batch, if it names no micro-batch."""

    stage: int

    letter: ClassVar[str]

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}"


@dataclass(frozen=True, slots=True)
class OfMicrobatch(OfStage):
    """An instruction of a stage for one micro-batch."""

    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.letter}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the layers of `stage` on `microbatch`; on the last stage, the loss as well.

    Roughly: `y[s, i] = stage[s](x[s, i]); kept[s, i] = graph, or x[s, i] only`

    With `keep_graph` everything the backward needs stays alive until the Backward, or the
    BackwardInput, of the same pair.  Without it, only the inputs and the random key of the stage,
    or of some of its layers, stay.  A Recompute must then come first.

    `version` counts the updates of the stage's weights in this run that the forward sees; the
    backward of the pair sees the same.  Without updates it is 0.
    """

    stage: int
    microbatch: int
    keep_graph: bool = True
    version: int = 0

    def __str__(self) -> str:
        seen = f"@{self.version}" if self.version else ""
        return f"{self.stage}{'F' if self.keep_graph else 'f'}{self.microbatch}{seen}"


@dataclass(frozen=True, slots=True)
class Recompute(OfMicrobatch):
    """Run the forward of `stage` on `microbatch` again, with the same bits, and keep its graph.

    Roughly: `kept[s, i] = graph of stage[s](kept[s, i])`

    Needs no gradient, so it may run while one is awaited (GPipe's early recompute, section 2.3).
    If only some layers dropped what they saved, each runs again when the backward comes to it.
    Buffers end as they were before; random numbers are those of the Forward.
    """

    letter = "R"


@dataclass(frozen=True, slots=True)
class Backward(OfMicrobatch):
    """Add the parameter gradients of `stage` for `microbatch`; free its activations.

    Roughly: `g_x[s, i], g_w += vjp(kept.pop((s, i)), g_y[s, i])`
    """

    letter = "B"


@dataclass(frozen=True, slots=True)
class BackwardInput(OfMicrobatch):
    """Compute the gradients that other stages wait for; leave those of weights to BackwardWeight.

    Roughly: `g_x[s, i] = vjp_x(kept[s, i], g_y[s, i]); kept[s, i] = operands of the weights' part`

    Weight gradients that cannot be computed later are computed here and kept.  They are added up
    in BackwardWeight only.  Frees the graph (Qi et al. 2023, "Zero Bubble Pipeline Parallelism").
    """

    letter = "I"


@dataclass(frozen=True, slots=True)
class BackwardWeight(OfMicrobatch):
    """Add the parameter gradients of `stage` for `microbatch` that its BackwardInput has left.

    Roughly: `g_w += vjp_w(kept.pop((s, i)))`

    Waits for nobody, so it may fill a bubble.  Frees all that is still kept for the pair.
    """

    letter = "W"


@dataclass(frozen=True, slots=True)
class Communication:
    """A message between `stage` and stage `peer` for `microbatch`."""

    stage: int
    microbatch: int
    peer: int

    gradient: ClassVar[bool]
    sign: ClassVar[str]

    def __str__(self) -> str:
        return (
            f"{self.stage}{'B' if self.gradient else 'F'}{self.microbatch}{self.sign}{self.peer}"
        )


@dataclass(frozen=True, slots=True)
class Send(Communication):
    """A message that `stage` hands over to stage `peer`."""

    sign = ">"

    @property
    def message(self) -> Message:
        return self.gradient, self.stage, self.peer, self.microbatch


@dataclass(frozen=True, slots=True)
class Receive(Communication):
    """A message that `stage` awaits from stage `peer`."""

    sign = "<"

    @property
    def message(self) -> Message:
        return self.gradient, self.peer, self.stage, self.microbatch


@dataclass(frozen=True, slots=True)
class SendActivation(Send):
    """Hand the values of `microbatch` that stage `peer` needs over to it.

    Roughly: `channel[s -> peer].put(y[s, i])`

    Keeps nothing that the forward did not keep; never waits for the receiver.
    """

    gradient = False


@dataclass(frozen=True, slots=True)
class ReceiveActivation(Receive):
    """Wait for the values of `microbatch` that `stage` needs from stage `peer`.

    Roughly: `x[s, i] += channel[peer -> s].get()`
    """

    gradient = False


@dataclass(frozen=True, slots=True)
class SendGradient(Send):
    """Hand the gradients of the values that `stage` received from stage `peer` back to it.

    Roughly: `channel[s -> peer].put(g_x[s, i])`; freed here once taken.
    """

    gradient = True


@dataclass(frozen=True, slots=True)
class ReceiveGradient(Receive):
    """Wait for the gradients of the values that `stage` sent to stage `peer` for `microbatch`.

    Roughly: `g_y[s, i] += channel[peer -> s].get()`
    """

    gradient = True


@dataclass(frozen=True, slots=True)
class CommitStatistics(OfStage):
    """Move the BatchNorm running statistics of `stage` once, by the pooled moments of the
    mini-batch.

    Roughly: `running = (1 - momentum) * running + momentum * pool(moments[s, 0..m-1])`

    Comes after the last Forward of the stage.  Frees the moments.
    """

    letter = "C"


@dataclass(frozen=True, slots=True)
class PostReceive:
    """Get ready for a message that `stage` will receive from stage `peer` for `microbatch`: an
    activation, or with `gradient` the gradient of one.

    Roughly: `channel[peer -> s].make_room()`

    Between processes the transfer then runs while the stage computes; within one there is nothing
    to do.  Keeps room for the message until its receive takes it.
    """

    stage: int
    microbatch: int
    peer: int
    gradient: bool

    @property
    def message(self) -> Message:
        return self.gradient, self.peer, self.stage, self.microbatch

    def __str__(self) -> str:
        return f"{self.stage}{'B' if self.gradient else 'F'}{self.microbatch}?{self.peer}"


@dataclass(frozen=True, slots=True)
class ReduceGradients(OfStage):
    """Add up the gradients of `stage` over all replicas, each as soon as it is complete.

    Roughly: `in the next backward of the stage: g_w = sum over replicas of g_w`

    Comes before the last Backward or BackwardWeight of the stage, which begins the sum of each
    bucket of gradients when its last one is there.  The end of the program awaits the sums.
    """

    letter = "G"


@dataclass(frozen=True, slots=True)
class Offload(OfMicrobatch):
    """Move the activations of `stage` for `microbatch` out of the device's memory, to its host's,
    or on a CPU to a file.

    Roughly: `away[s, i] = kept.pop((s, i))`

    Weights, buffers and the caller's batch stay where they are.  A Fetch brings the rest back.
    """

    letter = "H"


@dataclass(frozen=True, slots=True)
class Fetch(OfMicrobatch):
    """Bring back the activations that an Offload of the pair moved away, with the same bits.

    Roughly: `kept[s, i] = away.pop((s, i))`

    Comes before the Recompute, the Backward or the BackwardInput of the pair.
    """

    letter = "D"


@dataclass(frozen=True, slots=True)
class UpdateWeights(OfStage):
    """Let the optimizer move the weights of `stage` by the gradients since its last update.

    Roughly: `w[s, v + 1] = optimizer(w[s, v], g_w); g_w = 0; v += 1`

    Keeps w[s, v] until the backward of the last Forward that names it.  If none is left,
    w[s, v + 1] takes its memory.
    """

    letter = "U"


Compute = Forward | Recompute | Backward | BackwardInput | BackwardWeight
"""The instructions that run layers: schedule functions write them, and passes add some."""
COMPUTES: frozenset[type[Compute]] = frozenset(get_args(Compute))
"""The classes of `Compute`."""
GIVES_GRADIENTS: tuple[type[Backward | BackwardInput], ...] = (Backward, BackwardInput)
"""The instructions that compute gradients of a stage's inputs from gradients of its outputs."""
ADDS_GRADIENTS: tuple[type[Backward | BackwardWeight], ...] = (Backward, BackwardWeight)
"""The instructions that add to weight gradients, and free the last of a forward's activations."""
Instruction = (
    Compute
    | SendActivation
    | ReceiveActivation
    | SendGradient
    | ReceiveGradient
    | PostReceive
    | CommitStatistics
    | ReduceGradients
    | Offload
    | Fetch
    | UpdateWeights
)
"""An entry of a rank's program."""
Program = tuple[Instruction, ...]
"""The instructions of a rank, in the order in which it runs them."""

WORDS: Mapping[str, Callable[..., Instruction]] = {
    "0F0": Forward,
    "0f0": partial(Forward, keep_graph=False),
    "0F0@0": lambda stage, i, version: Forward(stage, i, version=version),
    "0f0@0": lambda stage, i, version: Forward(stage, i, keep_graph=False, version=version),
    "0R0": Recompute,
    "0B0": Backward,
    "0I0": BackwardInput,
    "0W0": BackwardWeight,
    "0H0": Offload,
    "0D0": Fetch,
    "0F0>0": SendActivation,
    "0F0<0": ReceiveActivation,
    "0B0>0": SendGradient,
    "0B0<0": ReceiveGradient,
    "0F0?0": partial(PostReceive, gradient=False),
    "0B0?0": partial(PostReceive, gradient=True),
    "0C": CommitStatistics,
    "0G": ReduceGradients,
    "0U": UpdateWeights,
}
"""The constructor of an instruction from the numbers in its word, by the word with zeros."""


def sent_message(instruction: Instruction) -> Message | None:
    """Name the message that `instruction` sends; None if it sends nothing."""
    return instruction.message if isinstance(instruction, Send) else None


def awaited_message(instruction: Instruction) -> Message | None:
    """Name the message that `instruction` waits for; None if it never waits."""
    return instruction.message if isinstance(instruction, Receive) else None


def is_backward_half(instruction: Instruction) -> bool:
    """Tell whether `instruction` belongs to the half of a step that begins with gradients."""
    if isinstance(instruction, Communication | PostReceive):
        return instruction.gradient
    return not isinstance(instruction, Forward | CommitStatistics | Offload)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One program for each rank; a program runs from first to last, in order.

    Printing a schedule gives its text form, which `schedules.parse` reads back.
    """

    programs: tuple[Program, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.programs)

    @property
    def num_stages(self) -> int:
        return 1 + max({instruction.stage for instruction in self.instructions}, default=-1)

    @property
    def num_microbatches(self) -> int:
        computes = {x.microbatch for x in self.instructions if x.__class__ in COMPUTES}
        return 1 + max(computes, default=-1)

    @classmethod
    def of(cls, programs: Iterable[Iterable[Instruction]]) -> "Schedule":
        """Return the schedule of these programs, one for each rank."""
        return cls(tuple(map(tuple, programs)))

    @property
    def instructions(self) -> Iterator[Instruction]:
        """Every instruction, rank by rank, each program in order."""
        return chain.from_iterable(self.programs)

    def __iter__(self) -> Iterator[tuple[int, Instruction]]:
        """Yield (rank, instruction), rank by rank, each program in order."""
        for rank, program in enumerate(self.programs):
            for instruction in program:
                yield rank, instruction

    @property
    def ranks(self) -> tuple[int, ...]:
        """The rank that runs each stage; 0 of a stage that no rank runs."""
        rank_of: dict[int, int] = {}
        for rank, program in enumerate(self.programs):
            rank_of.update(dict.fromkeys({instruction.stage for instruction in program}, rank))
        return tuple(rank_of.get(stage, 0) for stage in range(1 + max(rank_of, default=-1)))

    def __str__(self) -> str:
        from .text import to_text  # the text form knows the instructions, not the other way round

        return to_text(self)
