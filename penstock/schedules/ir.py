"""The instruction set: every schedule is written in it, and nothing else runs.

Letters in the "Roughly" lines: s a stage, i a micro-batch, x its input values, y its output
values, g gradients, kept[s, i] what a forward leaves behind for its backward.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True, slots=True)
class Forward:
    """Run the layers of `stage` on `microbatch`; on the last stage, the loss as well.

    Roughly: y[s, i] = stage[s](x[s, i]); kept[s, i] = graph, or x[s, i] only

    With `keep_graph` everything the backward needs stays alive until the Backward of the same
    pair. Without, only the stage's inputs and the random key stay, and a Recompute must come
    first.
    """

    stage: int
    microbatch: int
    keep_graph: bool = True


@dataclass(frozen=True, slots=True)
class Recompute:
    """Run the forward of `stage` on `microbatch` again, with the same bits, and keep its graph.

    Roughly: kept[s, i] = graph of stage[s](kept[s, i])

    Needs no gradient, so it may run while one is awaited (GPipe's early recompute, section 2.3).
    Buffers end as they were before; random numbers are those of the Forward.
    """

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Backward:
    """Add the parameter gradients of `stage` for `microbatch`; free what its forward kept.

    Roughly: g_x[s, i], g_w += vjp(kept.pop((s, i)), g_y[s, i])
    """

    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class SendActivation:
    """Hand the values of `microbatch` that stage `peer` needs from `stage` over to it.

    Roughly: channel[s -> peer].put(y[s, i])

    Keeps nothing that the forward did not keep; never waits for the receiver.
    """

    stage: int
    microbatch: int
    peer: int


@dataclass(frozen=True, slots=True)
class ReceiveActivation:
    """Wait for the values of `microbatch` that `stage` needs from stage `peer`.

    Roughly: x[s, i] += channel[peer -> s].get()
    """

    stage: int
    microbatch: int
    peer: int


@dataclass(frozen=True, slots=True)
class SendGradient:
    """Hand the gradients of what `stage` got from stage `peer` for `microbatch` back to it.

    Roughly: channel[s -> peer].put(g_x[s, i]); freed here once taken.
    """

    stage: int
    microbatch: int
    peer: int


@dataclass(frozen=True, slots=True)
class ReceiveGradient:
    """Wait for the gradients of what `stage` gave to stage `peer` for `microbatch`.

    Roughly: g_y[s, i] += channel[peer -> s].get()
    """

    stage: int
    microbatch: int
    peer: int


@dataclass(frozen=True, slots=True)
class CommitStatistics:
    """Move the BatchNorm running statistics of `stage` once, by the pooled moments of the
    mini-batch.

    Roughly: running = (1 - momentum) * running + momentum * pool(moments[s, 0..m-1])

    Comes after the last Forward of the stage.  Frees the moments.
    """

    stage: int


@dataclass(frozen=True, slots=True)
class PostReceive:
    """Get ready for what `stage` will receive from stage `peer` for `microbatch`: an activation,
    or with `gradient` the gradient of one.

    Roughly: channel[peer -> s].make_room()

    Between processes the transfer then runs while the stage computes; within one there is nothing
    to do.  Keeps room for the message until its receive takes it.
    """

    stage: int
    microbatch: int
    peer: int
    gradient: bool


@dataclass(frozen=True, slots=True)
class ReduceGradients:
    """Add up the gradients of `stage` over all replicas of the pipeline.

    Roughly: g_w = sum over replicas of g_w

    Comes after the last Backward of the stage.  Begins the sums and does not wait for them: they
    run while other stages still go backward, and are awaited where the program ends.
    """

    stage: int


Compute = Forward | Recompute | Backward
"""What a schedule function may write, or a pass add, that runs layers."""
Send = SendActivation | SendGradient
Receive = ReceiveActivation | ReceiveGradient
Communication = Send | Receive
Instruction = Compute | Communication | PostReceive | CommitStatistics | ReduceGradients
Program = tuple[Instruction, ...]


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
        computes = {x.microbatch for x in self.instructions if isinstance(x, Compute)}
        return 1 + max(computes, default=-1)

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
        found: dict[int, int] = {}
        for rank, program in enumerate(self.programs):
            found.update(dict.fromkeys({instruction.stage for instruction in program}, rank))
        return tuple(found.get(stage, 0) for stage in range(self.num_stages))

    def __str__(self) -> str:
        from .text import to_text  # the text form knows the instructions, not the other way round

        return to_text(self)
