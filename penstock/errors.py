"""Everything Penstock raises on purpose, as one tree.

    PenstockError
    ├── ConfigError (ValueError)      an argument that cannot work; found before anything runs
    │   ├── PartitionError            layers, stages and sizes that do not fit together
    │   ├── UnreadableError           a file or text that does not hold the value it should
    │   ├── PlanError                 a plan of another model, for other processes, or damaged
    │   └── BatchError                inputs or targets that cannot be cut into micro-batches
    │       └── UncountedError        a batch of which nothing counts; the next one may follow
    ├── ScheduleError (ValueError)    a schedule that is incomplete, unordered or never ends
    ├── BoundaryError (TypeError)     a value that cannot cross a stage boundary
    ├── RandomnessError               random numbers drawn where they cannot be reproduced
    ├── StateError                    state that changes while another stage may read it
    ├── CaptureError                  a model that cannot be cut, or runs otherwise than recorded
    │   ├── CutError (ConfigError)    blocks and cuts that cannot work
    │   ├── GlueError                 code between blocks that went another way
    │   ├── RouteError                a value that a stage needs, and that was not sent to it
    │   └── CheckError                a cut model whose outputs or gradients are not the model's
    ├── RecomputeError                a forward that cannot be run a second time with equal results
    ├── OffloadError (OSError)        what a forward keeps has no room elsewhere, or is lost there
    ├── WaitTimeout (TimeoutError)    a wait that outlived its deadline
    ├── MeshError                     processes that do not find each other, or lose each other
    │   └── PeerError (RuntimeError)  another process failed; says which, and what was awaited
    ├── CheckpointError               a checkpoint that is corrupt, foreign or incomplete
    └── TorchError (ImportError)      an installed torch that Penstock does not work with

Warnings are UserWarnings, and tell of what goes on in another way than was asked:

    ExecutionWarning                  a pipeline does not run as it was asked to
    StatisticsWarning                 statistics of a layer move with every micro-batch
    OutputWarning                     an output may not be that of the whole batch

An exception raised by user code inside a stage is never wrapped: it arrives as itself, with a note
(``Exception.__notes__``) that names the stage, the layer and the micro-batch.
"""

OLDEST_TORCH = (2, 11)
"""The oldest torch that the tests were run with; also the bound in pyproject.toml."""
NEWEST_TORCH = (2, 15)
"""The newest torch that they were run with; later ones are not refused."""


_SHOWN = 80
"""How much of a value an error shows."""


class PenstockError(Exception):
    """Base of every error that Penstock raises on purpose."""

    is_agreed = False
    """True if every process raises it, before anything runs, so that all may go on."""


class ConfigError(PenstockError, ValueError):
    """An argument cannot work; the message says which, with its value, and what to change."""


class PartitionError(ConfigError):
    """The layers, stages and layer counts do not fit together."""


class UnreadableError(ConfigError):
    """A file or text does not hold the value it should; the message names the place in it."""


class PlanError(ConfigError):
    """A plan is of another model or for other processes, or a file does not hold one."""


class BatchError(ConfigError):
    """Inputs or targets cannot be cut into micro-batches."""


class UncountedError(BatchError):
    """Nothing in a batch counts for the loss; all may go on with the next batch."""

    is_agreed = True


class ScheduleError(PenstockError, ValueError):
    """A schedule is incomplete, uses a value before it exists, or would wait for ever."""


class BoundaryError(PenstockError, TypeError):
    """A layer returned a value that cannot cross a stage boundary."""


class RandomnessError(PenstockError, RuntimeError):
    """Random numbers were drawn where they cannot be reproduced for another number of stages."""


class StateError(PenstockError, RuntimeError):
    """State changes while forwards may read it, so that values depend on the schedule."""


class CaptureError(PenstockError):
    """A model cannot be cut into stages, or does not run as it did when it was recorded."""


class CutError(CaptureError, ConfigError):
    """The blocks or the cuts of a captured model cannot work."""


class GlueError(CaptureError, RuntimeError):
    """The code between blocks went another way than on an earlier stage, or cannot be followed."""


class RouteError(CaptureError, RuntimeError):
    """A stage needs a value that was not sent to it."""


class CheckError(CaptureError, AssertionError):
    """The outputs or gradients of a cut model are not those of the model."""


class RecomputeError(PenstockError, RuntimeError):
    """A forward cannot be run a second time with equal results."""


class OffloadError(PenstockError, OSError):
    """What a forward keeps cannot be moved out of memory, or be brought back."""


class WaitTimeout(PenstockError, TimeoutError):
    """A wait outlived its deadline; the message says who waited for what from whom."""


class MeshError(PenstockError):
    """The processes of a job do not find each other, or lose each other."""


class PeerError(MeshError, RuntimeError):
    """Another process failed or is gone; the message says which, and what this one waited for.

    `complete` tells whether the message already says what was awaited.
    """

    def __init__(self, message: str, *, complete: bool = False) -> None:
        super().__init__(message)
        self.complete = complete


class CheckpointError(PenstockError):
    """A checkpoint is corrupt, incomplete or belongs to another model."""


class TorchError(PenstockError, ImportError):
    """The installed torch is too old, or lacks something; the message says which versions work."""

    def __init__(self, reason: str) -> None:
        (major, oldest), (_, newest) = OLDEST_TORCH, NEWEST_TORCH
        super().__init__(
            f"Penstock works with torch {major}.{oldest} to {major}.{newest}, and {reason}; "
            f"pip install 'torch>={major}.{oldest},<{major}.{newest + 1}'"
        )


class ExecutionWarning(UserWarning):
    """A pipeline does not run as it was asked to; the message says how it runs, and why."""


class StatisticsWarning(UserWarning):
    """Statistics of a layer (BatchNorm, float8 scales) move with every micro-batch; says why."""


class OutputWarning(UserWarning):
    """A value in the outputs of micro-batches may not be that of the whole batch."""


def sparse_gradient(where: str, shape: tuple[int, ...]) -> ConfigError:
    """Make the error for a gradient that cannot be added up over processes, nor be cut."""
    return ConfigError(
        f"{where} has a parameter of shape {tuple(shape)} with a sparse gradient, which processes "
        "that share a stage (replicas, shards) cannot add up or cut; make the embedding with "
        "sparse=False, or give its stage one process"
    )


def shown(value: object) -> str:
    """Write a value that was given in one line, cut short where it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def check_kind(name: str, value: object, kind: type | tuple[type, ...], give: str) -> None:
    """Refuse a value of another type; `give` says what to give instead.

    Raises:
        ConfigError: it is of another type.
    """
    if not isinstance(value, kind):
        raise ConfigError(f"{name}={shown(value)}; give {give}")


def check_count(name: str, value: int) -> int:
    """Return `value` if it is a whole number of at least 1.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name}={value!r}; it must be a whole number of at least 1")
    return value
