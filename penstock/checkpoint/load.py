"""Load what `save_checkpoint` wrote; all of it is checked first, so nothing is half loaded."""

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.model.extra_state import Owners, extra_faults, set_extra
from penstock.runtime.construction import is_pipeline
from penstock.sharding.layouts import Slice

from .files import (
    EXTRA,
    MODEL,
    OPTIMIZER,
    check_files,
    digest_of,
    read_state,
    size_of,
)
from .optimizer_state import (
    check_optimizer,
    keys_of,
    names_of_share,
    only_of,
    parameter_names,
    unpack_optimizer,
)
from .pieces import Pieces, Shape, files_for, find_pieces, read_pieces
from .processes import agreed, begin, held_of, refuse_foreign, shards_of


def load_checkpoint(
    path: str | os.PathLike[str], module: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> dict[str, Any]:
    """Load the folder `path` into `module` (a Pipeline or any nn.Module) and `optimizer`.

    A pipeline gets its counts of steps and evaluations and its seed back, so that its random
    streams go on.  Nothing is unpickled, and nothing is touched unless everything fits.

    Returns:
        The `state` that `save_checkpoint` was given.

    Raises:
        CheckpointError: not a checkpoint, damaged, or of another model or optimizer; lists every
            tensor that is missing, unexpected or of another shape or type.
    """
    path = Path(path)
    mesh = begin("load_checkpoint", module)
    what = "for the others to load the same checkpoint"
    found, told = agreed(
        mesh,
        partial(_Wanted.find, path, module, optimizer),
        lambda found: (found.sizes, found.content, str(path)),
        what,
    )
    _check_same([content for _, content, _ in told], [path for *_, path in told])
    digests = {
        file: found.digests.get(file, "")
        for file, rank in _verifiers([sizes for sizes, *_ in told]).items()
        if rank == mesh.rank
    }
    held = held_of(module)
    here, owners = held.state(), held.owners

    def read() -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
        saved, of_optimizer, wholes = mesh.world.work(partial(found.read, path, digests), what)
        faults = _model_faults(found.whole_of(here), owners, saved, wholes)
        of_saved = found.facts["optimizer"]
        if optimizer is not None and of_saved is None:
            faults.append("it was saved without an optimizer; load it without one")
        elif optimizer is not None:
            faults += check_optimizer(optimizer, module, of_saved, of_optimizer)
        return saved, of_optimizer, faults

    (saved, of_optimizer, _), told = agreed(
        mesh, read, lambda own: (own[-1], [*here, *owners]), what
    )
    known = set().union(*(names for _, names in told))
    strange = [
        f"{name} is not in the model"
        for name in found.there
        if name not in known and not held.is_of_loss(name)
    ]
    refuse_foreign(
        f"{path} is of another model or optimizer; build the one it was saved from:",
        [*(faults for faults, _ in told), strange],
    )
    return _put(module, optimizer, found.facts, saved, of_optimizer)


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
    if is_pipeline(module) and facts["pipeline"] is not None:
        noted = facts["pipeline"]
        module.step, module.seed = noted["step"], noted["seed"]
        module.evaluations = noted.get("evaluations", 0)
    state: dict[str, Any] = facts["state"]
    return state


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
    """What a checkpoint holds, and what of it this process needs: tensors, each with its pieces,
    and slices of those that are cut here.
    """

    facts: dict[str, Any]
    digests: dict[str, str]
    there: Collection[str]
    of_model: dict[str, Pieces]
    of_optimizer: dict[str, Pieces]
    slices: dict[str, Slice]
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
        if facts.get("files") is None:  # one process wrote it
            check_files(path, digests)  # before they are asked what they hold
        pieces = find_pieces(path, MODEL, facts)
        held, shards = held_of(module), shards_of(module)
        names = (*held.state(), *held.owners)
        of_model = {name: pieces[name] for name in names if name in pieces}
        there = {*pieces, *facts.get(EXTRA, {})}
        slices = shards.slices(of_model)
        of_optimizer: dict[str, Pieces] = {}
        if optimizer is not None and facts["optimizer"] is not None:
            facts["optimizer"] = only_of(facts["optimizer"], parameter_names(module).values())
            pieces = find_pieces(path, OPTIMIZER, facts)
            own = keys_of(names_of_share(optimizer, module), pieces)
            of_optimizer = {key: pieces[key] for key in own}
            slices |= shards.slices(of_optimizer, of_optimizer=True)
        needed = files_for(of_model, slices) | files_for(of_optimizer, slices)
        sizes = {file: size_of(path, file) for file in needed}
        return cls(facts, digests, there, of_model, of_optimizer, slices, sizes, content)

    def read(
        self, path: Path, digests: Mapping[str, str]
    ) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Shape]]:
        """Verify the files of `digests`, and read the state of the model, the tensors of the
        optimizer, and the whole shapes of those of the model.

        Raises:
            CheckpointError: a file is damaged.
        """
        check_files(path, digests)
        saved, wholes = read_pieces(path, self.of_model, self.slices)
        of_optimizer, _ = read_pieces(path, self.of_optimizer, self.slices)
        return {**saved, **self.facts.get(EXTRA, {})}, of_optimizer, wholes

    def whole_of(self, here: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Shape]]:
        """Return tensors of the model, each with the shape of its whole."""
        return {
            name: (tensor, self.slices[name].whole if name in self.slices else tuple(tensor.shape))
            for name, tensor in here.items()
        }


def _model_faults(
    here: Mapping[str, tuple[Tensor, Shape]],
    owners: Owners,
    there: Mapping[str, Any],
    wholes: Mapping[str, Shape],
) -> list[str]:
    known = {**here, **owners}
    faults = [f"{name} is missing" for name in known if name not in there]
    faults += extra_faults(owners, there)
    first_name: dict[tuple[int, torch.Size], str] = {}
    for name in (name for name in here if name in there):
        (mine, shape), saved = here[name], there[name]
        if shape != wholes[name] or mine.dtype != saved.dtype:
            found, wanted = _kind(saved.dtype, wholes[name]), _kind(mine.dtype, shape)
            faults.append(f"{name} is {found}, the model's is {wanted}")
        if mine.is_meta:
            faults.append(f"{name} has no memory in the model: it is on the meta device")
            continue
        first = first_name.setdefault((mine.data_ptr(), mine.shape), name)
        if first != name and not torch.equal(there[first], saved):
            faults.append(f"{name} and {first} are one tensor in the model but differ")
    return faults


def _kind(dtype: torch.dtype, shape: Shape) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
