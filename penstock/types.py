"""The words a user chooses from, as values or as strings.  Imports nothing of torch."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from .errors import ConfigError, shown

LONGEST_TIMEOUT_S = 365 * 24 * 3600.0
"""A wait that may last longer is taken for a mistake."""
_Word = TypeVar("_Word", bound=Enum)


def letters_of(text: str) -> str:
    """Return the letters and digits of a name, in lower case: "ZB-H1" and "zb_h1" are one."""
    return "".join(filter(str.isalnum, text.lower()))


def word_of(name: str, value: Any, kind: type[_Word], more: str = "") -> _Word:
    """Return the member of an enum that `value` is or names, by its value or by its name.

        word_of("recompute", "stage", Recompute)  ->  Recompute.STAGE

    Raises:
        ConfigError: it names none; lists those that there are, and `more`.
    """
    if isinstance(value, str):
        for member in kind:
            if letters_of(value) in (letters_of(member.value), letters_of(member.name)):
                return member
    if not isinstance(value, kind):
        words = ", ".join(f'"{member.value}"' for member in kind)
        raise ConfigError(f"{name}={shown(value)}; give one of {words}{more}")
    return value


class Reduction(Enum):
    """How the user's loss function reduces over the samples it is given.

    Decides the weight of a micro-batch's loss, so that the weighted losses of all micro-batches
    sum to the loss of the whole mini-batch.  The weight is applied before the backward pass;
    gradients are never rescaled afterwards.
    """

    MEAN = "mean"
    """The mean over samples: micro-batch i of n_i samples weighs n_i / N."""
    SUM = "sum"
    """The sum over samples: every micro-batch weighs 1."""


class Recompute(Enum):
    """Which activations are dropped after a forward and computed again before its backward."""

    STAGE = "stage"
    """Keep a stage's inputs only (GPipe, section 2.3); all where the backward follows at once."""
    NEVER = "never"
    """Keep everything the backward needs."""
    LAYERS = "layers"
    """Keep the inputs of each layer only; a backward recomputes one layer at a time, so it holds
    what one of them saves."""

    @staticmethod
    def layers(*layers: int | str) -> "RecomputeLayers":
        """Keep everything but what these layers save: their inputs only, as LAYERS does for all.

        Args:
            layers: their names, or their numbers in the model; a stage recomputes those it has.
        """
        return RecomputeLayers(layers)


@dataclass(frozen=True, slots=True)
class RecomputeLayers:
    """Recompute some layers of a stage, each from its own inputs; see `Recompute.layers`."""

    layers: tuple[int | str, ...]

    @property
    def value(self) -> str:
        """What is recomputed, in words."""
        return "layers " + ", ".join(map(str, self.layers)) if self.layers else "never"

    @property
    def name(self) -> str:
        """The same, as it is written."""
        return f"layers({', '.join(map(repr, self.layers))})"


RecomputePolicy = Recompute | RecomputeLayers
"""What is computed twice on a stage."""


class TiedGradients(Enum):
    """When the gradient of a weight goes from a stage that uses it to the stage that has it."""

    PER_MICROBATCH = "per micro-batch"
    """With every micro-batch: all terms add up in the order of the unsplit model, to the bit."""
    SUMMED = "summed"
    """Once in a step, as the sum over the micro-batches: M times less to send.  The gradients of
    weights that several stages use are then rounded otherwise than in the unsplit model; all
    others keep their bits, and every run of the same cut gives the same.  A model whose values
    decide what runs sends them with every micro-batch all the same."""


class CheckBatches(Enum):
    """When the ranks of a replica compare the values that they are given for a step.

    All of them work on one mini-batch.  Integers are compared whole, of other tensors up to 4,096
    values at even distances; ranks that are given None are left out.
    """

    ALWAYS = "always"
    """At every step."""
    FIRST = "first"
    """At the first eight steps, and then at every hundredth."""
    NEVER = "never"
    """At none; of shards of a stage the shapes are compared all the same."""


class Outputs(Enum):
    """Which ranks get the outputs of `pipe(inputs)` between processes.

    Where a rank gets none, the call returns a scalar 0.  Every rank calls `backward()` of what it
    got, or of a loss that it computed from the outputs.
    """

    ALL = "all"
    """All ranks, each with a copy; all compute the same loss."""
    LAST = "last"
    """The ranks of the last stage, where the outputs are computed already."""


class Trace(Enum):
    """What a step records about itself."""

    OFF = "off"
    """Nothing."""
    TIME = "time"
    """When each instruction started and ended on its rank."""
    MEMORY = "memory"
    """Times, and the bytes each stage keeps for its backward passes (costs some speed)."""


class Transport(Enum):
    """How the stages run and hand values over; the results are the same.

    One that cannot carry values where a pipeline runs is replaced by the first below that can.
    """

    THREADS = "threads"
    """In one process: a worker thread per rank, so that stages run at the same time."""
    LOOPBACK = "loopback"
    """In one process: the calling thread runs all ranks in turn, for debugging and tests."""
    TORCH_DISTRIBUTED = "torch.distributed"
    """Between processes: sends and receives of torch's backend for their devices (gloo, NCCL)."""

    @property
    def is_between_processes(self) -> bool:
        """Whether it carries values from one process to another."""
        return self is Transport.TORCH_DISTRIBUTED
