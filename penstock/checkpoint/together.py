"""Save and load collectively: begin a call, raise errors on all ranks alike, write a folder.

Each process writes in a thread, over a separate process group, so that training may go on.

    rank 0     make a hidden folder ──► write files ──► gather digests ──► state.json, rename
    others     wait ──────────────────► write files ──► gather digests ──► wait
"""

import shutil
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from torch import nn

from penstock.errors import CheckpointError, PeerError, WaitTimeout
from penstock.mesh import Mesh
from penstock.mesh.agreement import Outcome, outcome_of
from penstock.mesh.control import Control
from penstock.model.state import Held
from penstock.runtime.pipeline_module import PipelineModule, is_pipeline, parts_of
from penstock.runtime.shards.at_rest import CutWeights

from .files import UNFINISHED, put_in_place

Result = TypeVar("Result")
Digests = dict[str, str]
"""Digests of the files that a process has written, by file name; "" if nothing reads them."""
_MOST_FAULTS = 100


class Share(NamedTuple):
    """The mesh of a model, the state in this process, and its slices of shared weights."""

    mesh: Mesh
    held: Held
    shards: CutWeights

    @classmethod
    def of(cls, pipe: PipelineModule) -> "Share":
        """Return the share of this process in a pipeline."""
        parts = parts_of(pipe)
        return cls(pipe.mesh, parts.held, parts.shards)


def begin(call: str, module: nn.Module) -> Share:
    """Begin a call, one of `agreement.CALLS`, with all processes that hold parts of a model; a
    MeshError if they begin different calls, or for different pipelines.
    """
    if not is_pipeline(module):
        return Share(Mesh.of_one_process(), Held(module, module), CutWeights({}, {}))
    module.mesh.world.begin_call(call, parts_of(module).number)
    return Share.of(module)


def agreed(
    mesh: Mesh, job: Callable[[], Result], tell: Callable[[Result], Any], purpose: str
) -> tuple[Result, list[Any]]:
    """Run a job in every process; an error of one is raised on all, several as a CheckpointError.

    Return the job's result here, and `tell(result)` of each process, in the order of ranks.
    """
    try:
        result = job()
    except (PeerError, WaitTimeout):  # there is nobody to agree with
        raise
    except Exception as error:
        if mesh.world_size == 1:
            raise
        raise _refusal(mesh.world.gather((str(error), None), purpose)) from error
    answers = mesh.world.gather((None, tell(result)), purpose)
    if any(problem is not None for problem, _ in answers):
        raise _refusal(answers)
    return result, [part for _, part in answers]


def _refusal(answers: list[tuple[str | None, Any]]) -> CheckpointError:
    said = {rank: problem for rank, (problem, _) in enumerate(answers) if problem is not None}
    if len(said) == len(answers) and len(set(said.values())) == 1:
        return CheckpointError(said[0])
    return CheckpointError("; ".join(f"rank {rank}: {problem}" for rank, problem in said.items()))


def refuse_foreign(head: str, reports: Iterable[Iterable[str]], *tail: str) -> None:
    """Raise a CheckpointError of `head`, all faults and `tail`, if any process has faults."""
    faults = list(dict.fromkeys(fault for said in reports for fault in said))
    if faults:
        lines = [f"  {fault}" for fault in faults[:_MOST_FAULTS]]
        if len(faults) > _MOST_FAULTS:
            lines.append(f"  and {len(faults) - _MOST_FAULTS} more")
        raise CheckpointError("\n".join([head, *lines, *filter(None, tail)]))


class Saving:
    """A checkpoint that is being written."""

    def __init__(self, path: Path, wait: Callable[[], None]) -> None:
        self.path = path
        """The folder, once it is there."""
        self._wait = wait
        self._outcome: Outcome | None = None

    def wait(self) -> None:
        """Return when the folder is there, however long it takes.

        Raises:
            CheckpointError: it cannot be written; nothing is left of it.
            PeerError: another process failed meanwhile.
            WaitTimeout: another process does not answer within the mesh's deadline.
        """
        if self._outcome is None:
            self._outcome = outcome_of(self._wait)
        self._outcome.result()


def write_together(
    mesh: Mesh,
    path: Path,
    refuse: Callable[[Path], None],
    write_own: Callable[[Path], Digests],
    finish: Callable[[Path, Digests], None],
) -> Saving:
    """Begin to write the folder `path`, unless `refuse` raises.

    Every process writes its files by `write_own`; then rank 0 calls `finish` with all digests.
    Writing has no deadline.  The tensors must not change until it has ended.

    Waiting for it raises:
        CheckpointError: `refuse` did, or a disk refuses; on every process alike.
        PeerError: a process failed meanwhile.
    """
    purpose = f"for all to write the checkpoint {path}"

    def complete(unfinished: Path, digests: Digests) -> None:
        finish(unfinished, digests)
        put_in_place(unfinished, path, digests.keys())

    def write(world: Control) -> None:
        # 1. Rank 0 makes the hidden folder.
        world.from_first(partial(refuse, path), purpose)
        parts = [world.from_first(partial(_try, world, _make_unfinished, path), purpose)]
        unfinished = parts[0][0]
        # 2. Each rank writes its files.  Errors are gathered, not raised: all ranks get here.
        if unfinished is not None:
            mine = world.work(partial(_try, world, write_own, unfinished), purpose)
            parts = world.gather(mine, purpose)
        # 3. Rank 0 writes state.json and renames the folder.
        if all(error is None for _, error in parts):
            digests = {name: digest for written, _ in parts for name, digest in written.items()}
            job = partial(_try, world, complete, unfinished, digests)
            parts = [world.from_first(job, purpose)]
        # 4. Report the errors of any rank on all, and leave nothing behind.
        errors = dict.fromkeys(error for _, error in parts if error is not None)
        if errors:
            if world.rank == 0 and unfinished is not None:
                shutil.rmtree(unfinished, ignore_errors=True)
            reached = " that all processes reach" if world.size > 1 else ""
            raise CheckpointError(
                f"cannot write the checkpoint {path}: {'; '.join(errors)}; nothing is left "
                f"of it. Make room, or choose another place{reached}"
            )

    return Saving(path, mesh.begin_save(write, purpose))


def _make_unfinished(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=UNFINISHED, dir=path.parent))
    made.chmod(0o755)  # mkdtemp makes it private; other processes may be other hosts'
    return made


def _try(world: Control, job: Callable[..., Any], *arguments: Any) -> tuple[Any, str | None]:
    """Return the result of a job and None, or None and the text of its error."""
    try:
        return job(*arguments), None
    except Exception as problem:
        return None, f"rank {world.rank}: {problem}" if world.size > 1 else f"{problem}"
