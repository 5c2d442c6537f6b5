"""The processes that hold parts of a model which is saved or loaded: one, or those of a mesh."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import nn

from penstock.errors import CheckpointError, PeerError, WaitTimeout
from penstock.mesh import Mesh
from penstock.model.state import Held
from penstock.runtime.construction import is_pipeline
from penstock.runtime.shards.at_rest import CutWeights

ALONE = Mesh.of_one_process()

Found = TypeVar("Found")
_MOST_FAULTS = 100


def begin(call: str, module: nn.Module) -> Mesh:
    """Begin a call, one of `agreement.CALLS`, with all processes that hold parts of a model.

    Raises:
        MeshError: they begin different calls, or for different pipelines.
    """
    if not is_pipeline(module):
        return ALONE
    module.mesh.world.begin_call(call, module.number)
    return module.mesh


def held_of(module: nn.Module) -> Held:
    """Return what this process has of a pipeline, or of any module, which it has whole."""
    return module.held if is_pipeline(module) else Held(module, module)


def shards_of(module: nn.Module) -> CutWeights:
    """Return what this process has of weights that several processes share."""
    return module.shards if is_pipeline(module) else CutWeights({}, {})


def agreed(
    mesh: Mesh, job: Callable[[], Found], tell: Callable[[Found], Any], what: str
) -> tuple[Found, list[Any]]:
    """Run a job in every process; all refuse what one of them must refuse.

    Returns:
        What the job found here, and what each process tells of that, in the order of ranks.

    Raises:
        CheckpointError: says what went wrong, and on which ranks where not on all alike; in a
            process that is alone, whatever the job raised.
    """
    try:
        found = job()
    except (PeerError, WaitTimeout):  # there is nobody to agree with
        raise
    except Exception as error:
        if mesh.world_size == 1:
            raise
        raise _refusal(mesh.world.gather((str(error), None), what)) from error
    told = mesh.world.gather((None, tell(found)), what)
    if any(problem is not None for problem, _ in told):
        raise _refusal(told)
    return found, [part for _, part in told]


def _refusal(told: list[tuple[str | None, Any]]) -> CheckpointError:
    said = {rank: problem for rank, (problem, _) in enumerate(told) if problem is not None}
    if len(said) == len(told) and len(set(said.values())) == 1:
        return CheckpointError(said[0])
    return CheckpointError("; ".join(f"rank {rank}: {problem}" for rank, problem in said.items()))


def refuse_foreign(head: str, told: Iterable[Iterable[str]], *tail: str) -> None:
    """Refuse what does not fit the model, if any process told of faults.

    Raises:
        CheckpointError: `head`, the faults, each once, and `tail`.
    """
    faults = list(dict.fromkeys(fault for said in told for fault in said))
    if faults:
        lines = [f"  {fault}" for fault in faults[:_MOST_FAULTS]]
        if len(faults) > _MOST_FAULTS:
            lines.append(f"  and {len(faults) - _MOST_FAULTS} more")
        raise CheckpointError("\n".join([head, *lines, *filter(None, tail)]))
