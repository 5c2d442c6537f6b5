"""Load what `save_checkpoint` wrote; all of it is checked first, so nothing is half loaded."""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.mesh import Mesh
from penstock.model.extra_state import Owners, extra_faults, set_extra
from penstock.optim.pipeline_like import PipelineLike

from .files import (
    EXTRA,
    MODEL,
    OPTIMIZER,
    check_files,
    digest_of,
    files_by_tensor,
    read_facts,
    read_from,
    read_state,
    read_tensors,
    size_of,
)
from .held import held_of
from .optimizer_state import (
    check_optimizer,
    keys_of,
    names_of_share,
    only_of,
    parameter_names,
    unpack_optimizer,
)

_MOST_FAULTS = 100


def load_checkpoint(
    path: str | os.PathLike[str], module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Load the folder `path` into `module` (a Pipeline or any nn.Module) and `optimizer`.

    A pipeline gets its step count and seed back, so that its random streams go on.  Nothing is
    unpickled, and nothing is touched unless everything fits.

    Returns:
        The `state` that `save_checkpoint` was given.

    Raises:
        CheckpointError: not a checkpoint, damaged, or of another model or optimizer; lists every
            tensor that is missing, unexpected or of another shape or type.
    """
    path = Path(path)
    mesh = module.mesh if isinstance(module, PipelineLike) else None
    if mesh is not None and mesh.is_distributed:
        return _load_into_many(path, mesh, module, optimizer)
    facts = read_facts(path)
    saved = {**read_tensors(path, MODEL), **facts.get(EXTRA, {})}
    held = held_of(module)
    faults = _model_faults(held.state(), held.owners, saved)
    optimizer_tensors: dict[str, Tensor] = {}
    if optimizer is not None:
        if facts["optimizer"] is None:
            raise CheckpointError(
                f"{path} was saved without an optimizer; load it without one to start a new one"
            )
        optimizer_tensors = read_tensors(path, OPTIMIZER)
        faults += check_optimizer(optimizer, module, facts["optimizer"], optimizer_tensors)
    if faults:
        raise CheckpointError(_foreign(path, faults))
    return _put(module, optimizer, facts, saved, optimizer_tensors)


def _put(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    facts: dict[str, Any],
    saved: dict[str, Any],
    optimizer_tensors: dict[str, Tensor],
) -> dict[str, Any]:
    held = held_of(module)
    owners = held.owners
    tensors = {n: v for n, v in saved.items() if isinstance(v, Tensor) and n not in owners}
    whole = {**held.state(), **tensors}  # other processes have the rest
    module.load_state_dict(whole, strict=False)  # what it lacks is extra state
    set_extra(owners, saved)
    if optimizer is not None:
        unpack_optimizer(optimizer, module, facts["optimizer"], optimizer_tensors)
    if isinstance(module, PipelineLike) and facts["pipeline"] is not None:
        module.step, module.seed = facts["pipeline"]["step"], facts["pipeline"]["seed"]
    state: dict[str, Any] = facts["state"]
    return state


def _load_into_many(
    path: Path, mesh: Mesh, module: nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, Any]:
    """Let each process read what its own stage needs; all of them refuse what one must refuse.

    No file is opened by a process that needs none of it, and each is verified by one of those
    that read it.
    """
    assert isinstance(module, PipelineLike)
    mesh.begin_call("load_checkpoint", module.number)
    what = "for the others to load the same checkpoint"
    found, problem = _try(partial(_Wanted.find, path, module, optimizer))
    sizes, content = (found.sizes, found.content) if found is not None else ({}, "")
    needs = mesh.gather((problem, sizes, content, str(path)), what)
    _refuse_problems(problem for problem, *_ in needs)
    _check_same([content for _, _, content, _ in needs], [path for *_, path in needs])
    assert found is not None
    digests = {
        file: found.digests.get(file, "")
        for file, rank in _verifiers([sizes for _, sizes, *_ in needs]).items()
        if rank == mesh.rank
    }
    held = held_of(module)
    here, owners = held.state_here(), held.owners
    read, problem = mesh.work(lambda: _try(partial(found.read, path, digests)), what)
    saved, optimizer_tensors = read or ({}, {})
    faults: list[str] = []
    if problem is None:
        faults = _model_faults(here, owners, saved)
        faults = [fault for fault in faults if not fault.endswith(_NOT_IN_MODEL)]
        faults += _optimizer_faults(optimizer, module, found.facts, optimizer_tensors)
    parts = mesh.gather((problem, faults, {*here, *owners}), what)
    _refuse_problems(problem for problem, _, _ in parts)
    faults = [fault for _, said, _ in parts for fault in said]
    if not faults:
        known = set().union(*(names for _, _, names in parts))
        faults = [f"{name}{_NOT_IN_MODEL}" for name in found.there if name not in known]
    if faults:
        raise CheckpointError(_foreign(path, list(dict.fromkeys(faults))))
    return _put(module, optimizer, found.facts, saved, optimizer_tensors)


def _try(job: Callable[[], Any]) -> tuple[Any, str | None]:
    """Return what a job gives, or what went wrong, to be told to the other processes."""
    try:
        return job(), None
    except Exception as error:
        return None, str(error)


def _refuse_problems(problems: Iterable[str | None]) -> None:
    if said := [problem for problem in problems if problem is not None]:
        raise CheckpointError("; ".join(dict.fromkeys(said)))


def _check_same(contents: Sequence[str], paths: Sequence[str]) -> None:
    """See that all processes load the same, wherever each of them has it."""
    for rank, content in enumerate(contents):
        if content != contents[0]:
            raise CheckpointError(
                f"the processes load different checkpoints: rank 0 {paths[0]}, rank {rank} "
                f"{paths[rank]}, which differs from it. Give all of them the same one"
            )


def _verifiers(needs: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Deal out files to be verified, each to one of the ranks that read it, evenly by bytes."""
    loads = [0] * len(needs)
    found = {}
    for file, size in sorted({file: n for need in needs for file, n in need.items()}.items()):
        readers = [rank for rank, need in enumerate(needs) if file in need]
        found[file] = min(readers, key=lambda rank: (loads[rank], rank))
        loads[found[file]] += size
    return found


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What a checkpoint holds, and what of it this process needs: tensors, each with its file."""

    facts: dict[str, Any]
    digests: dict[str, str]
    there: Collection[str]
    of_model: dict[str, str]
    of_optimizer: dict[str, str]
    sizes: dict[str, int]
    content: str

    @classmethod
    def find(
        cls, path: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None
    ) -> "_Wanted":
        """Find out, without reading tensors.

        Raises:
            CheckpointError: it is no checkpoint, or damaged.
        """
        facts, digests = read_state(path)
        content = digest_of([facts, digests])
        noted = facts.get("files")
        files = files_by_tensor(path, MODEL, noted)
        held = held_of(module)
        names = (*held.state_here(), *held.owners)
        of_model = {name: files[name] for name in names if name in files}
        there = {*files, *facts.get(EXTRA, {})}
        of_optimizer: dict[str, str] = {}
        if optimizer is not None and facts["optimizer"] is not None:
            facts["optimizer"] = only_of(facts["optimizer"], parameter_names(module).values())
            files = files_by_tensor(path, OPTIMIZER, noted)
            own = keys_of(names_of_share(optimizer, module), files)
            of_optimizer = {key: files[key] for key in own}
        needed = {*of_model.values(), *of_optimizer.values()}
        sizes = {file: size_of(path, file) for file in needed}
        return cls(facts, digests, there, of_model, of_optimizer, sizes, content)

    def read(
        self, path: Path, digests: Mapping[str, str]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Verify the files of `digests`, and read the state of the model and the tensors of the
        optimizer.

        Raises:
            CheckpointError: a file is damaged.
        """
        check_files(path, digests)
        saved = {**read_from(path, self.of_model), **self.facts.get(EXTRA, {})}
        return saved, read_from(path, self.of_optimizer)


def _optimizer_faults(
    optimizer: torch.optim.Optimizer | None,
    module: nn.Module,
    facts: dict[str, Any],
    tensors: dict[str, Tensor],
) -> list[str]:
    if optimizer is None:
        return []
    if facts["optimizer"] is None:
        return ["it was saved without an optimizer; load it without one"]
    return check_optimizer(optimizer, module, facts["optimizer"], tensors)


_NOT_IN_MODEL = " is not in the model"


def _model_faults(here: Mapping[str, Any], owners: Owners, there: Mapping[str, Any]) -> list[str]:
    known = {**here, **owners}
    faults = [f"{name} is missing" for name in known if name not in there]
    faults += [f"{name}{_NOT_IN_MODEL}" for name in there if name not in known]
    faults += extra_faults(owners, there)
    first_name: dict[tuple[int, torch.Size], str] = {}
    for name in (name for name in here if name in there):
        mine, saved = here[name], there[name]
        if mine.shape != saved.shape or mine.dtype != saved.dtype:
            faults.append(f"{name} is {_kind(saved)}, the model's is {_kind(mine)}")
        if mine.is_meta:
            faults.append(f"{name} has no memory in the model: it is on the meta device")
            continue
        first = first_name.setdefault((mine.data_ptr(), mine.shape), name)
        if first != name and not torch.equal(there[first], saved):
            faults.append(f"{name} and {first} are one tensor in the model but differ")
    return faults


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _foreign(path: Path, faults: list[str]) -> str:
    lines = [f"  {fault}" for fault in faults[:_MOST_FAULTS]]
    if len(faults) > _MOST_FAULTS:
        lines.append(f"  and {len(faults) - _MOST_FAULTS} more")
    return "\n".join(
        [f"{path} is of another model or optimizer; build the one it was saved from:", *lines]
    )
