"""Load a checkpoint that `save_checkpoint` wrote; check all of it before any tensor changes."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CheckpointError
from penstock.model.state import Held, extra_faults, set_extra
from penstock.runtime.pipeline_module import is_pipeline
from penstock.sharding.layouts import Slice

from .files import damaged
from .optimizer_state import check_optimizer, select, unpack_optimizer
from .reader import CheckpointReader, Pieces, Shape, files_for, read_pieces
from .together import Share, agreed, begin, refuse_foreign


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
    # 1. Find the needed files, and check that all ranks load the same checkpoint.
    path = Path(path)
    share = begin("load_checkpoint", module)
    mesh, held, _ = share
    purpose = "for the others to load the same checkpoint"
    wanted, answers = agreed(
        mesh,
        partial(_Wanted.find, path, module, optimizer, share),
        lambda wanted: (wanted.sizes, wanted.saved.digest, str(path)),
        purpose,
    )
    _check_same([content for _, content, _ in answers], [path for *_, path in answers])
    # 2. Read and compare.  Each file is verified once, by one of its readers.
    verifiers = _verifiers([sizes for sizes, *_ in answers])
    mine = [file for file, rank in verifiers.items() if rank == mesh.rank]
    here, owners, facts = held.state(), held.owners, wanted.saved.facts

    def read() -> tuple[dict[str, Any], dict[str, Tensor], list[str]]:
        of_model, of_optimizer, wholes = mesh.world.work(partial(wanted.read, mine), purpose)
        faults = _model_faults(held, wanted.slices, of_model, wholes)
        if optimizer is not None and facts["optimizer"] is None:
            faults.append("it was saved without an optimizer; load it without one")
        elif optimizer is not None:
            faults += check_optimizer(optimizer, module, facts["optimizer"], of_optimizer)
        return of_model, of_optimizer, faults

    (of_model, of_optimizer, _), answers = agreed(
        mesh, read, lambda result: (result[-1], [*here, *owners]), purpose
    )
    # 3. Refuse on all ranks alike, before any tensor is changed.
    known = set().union(*(names for _, names in answers))
    strange = [
        f"{name} is not in the model"
        for name in {**wanted.saved.model, **wanted.saved.extra}
        if name not in known and not held.is_of_loss(name)
    ]
    refuse_foreign(
        f"{path} is of another model or optimizer; build the one it was saved from:",
        [*(faults for faults, _ in answers), strange],
    )
    # 4. Copy the values.
    tensors = {n: v for n, v in of_model.items() if isinstance(v, Tensor) and n not in owners}
    module.load_state_dict({**here, **tensors}, strict=False)  # others have the rest
    set_extra(owners, of_model)
    if optimizer is not None:
        unpack_optimizer(optimizer, module, facts["optimizer"], of_optimizer)
    if is_pipeline(module) and (noted := facts["pipeline"]) is not None:
        module.step, module.seed = noted["step"], noted["seed"]
        module.evaluations = noted.get("evaluations", 0)
    return wanted.saved.state


def _check_same(contents: Sequence[str], paths: Sequence[str]) -> None:
    """Refuse other checkpoints than rank 0's, wherever each of the processes has it."""
    for rank, content in enumerate(contents):
        if content != contents[0]:
            raise CheckpointError(
                f"the processes load different checkpoints: rank 0 {paths[0]}, rank {rank} "
                f"{paths[rank]}, which differs from it. Give all of them the same one"
            )


def _verifiers(needs: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Deal out files to be verified, each to one of the ranks that read it, evenly by bytes."""
    loads = [0] * len(needs)
    verifier_of = {}
    for file, size in sorted({file: n for need in needs for file, n in need.items()}.items()):
        readers = [rank for rank, need in enumerate(needs) if file in need]
        verifier_of[file] = min(readers, key=lambda rank: (loads[rank], rank))
        loads[verifier_of[file]] += size
    return verifier_of


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The tensors that this process needs, by their pieces and slices, and the files' sizes."""

    saved: CheckpointReader
    of_model: dict[str, Pieces]
    of_optimizer: dict[str, Pieces]
    slices: dict[str, Slice]
    sizes: dict[str, int]

    @classmethod
    def find(
        cls, path: Path, module: nn.Module, optimizer: torch.optim.Optimizer | None, share: Share
    ) -> "_Wanted":
        """Find out, without reading tensors."""
        saved, (_, held, shards) = CheckpointReader(path), share
        names = (*held.state(), *held.owners)
        of_model = {name: saved.model[name] for name in names if name in saved.model}
        slices, of_optimizer = shards.slices(of_model), dict[str, Pieces]()
        if optimizer is not None and (facts := saved.facts["optimizer"]) is not None:
            facts_here, keys = select(optimizer, module, facts, saved.optimizer)
            saved.facts["optimizer"] = facts_here
            of_optimizer = {key: saved.optimizer[key] for key in keys}
            slices |= shards.slices(of_optimizer, of_optimizer=True)
        needed = files_for(of_model, slices) | files_for(of_optimizer, slices)
        try:
            sizes = {file: (path / file).stat().st_size for file in needed}
        except OSError as error:
            raise damaged(path, str(Path(error.filename).relative_to(path)), error) from None
        return cls(saved, of_model, of_optimizer, slices, sizes)

    def read(
        self, files: Iterable[str]
    ) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Shape]]:
        """Verify `files`; read the state, the optimizer's tensors, and whole shapes."""
        self.saved.verify(files)
        of_model, wholes = read_pieces(self.saved.path, self.of_model, self.slices)
        of_optimizer, _ = read_pieces(self.saved.path, self.of_optimizer, self.slices)
        return {**of_model, **self.saved.extra}, of_optimizer, wholes


def _model_faults(
    held: Held, slices: Mapping[str, Slice], there: Mapping[str, Any], wholes: Mapping[str, Shape]
) -> list[str]:
    here, owners = held.state(), held.owners
    faults = [f"{name} is missing" for name in (*here, *owners) if name not in there]
    faults += extra_faults(owners, there)
    first_name: dict[tuple[int, torch.Size], str] = {}
    for name in (name for name in here if name in there):
        mine, saved = here[name], there[name]
        shape = slices[name].whole if name in slices else tuple(mine.shape)
        if shape != wholes[name] or mine.dtype != saved.dtype:
            saved_kind, wanted = _kind(saved.dtype, wholes[name]), _kind(mine.dtype, shape)
            faults.append(f"{name} is {saved_kind}, the model's is {wanted}")
        if mine.is_meta:
            faults.append(f"{name} has no memory in the model: it is on the meta device")
            continue
        first = first_name.setdefault((mine.data_ptr(), mine.shape), name)
        if first != name and not torch.equal(there[first], saved):
            faults.append(f"{name} and {first} are one tensor in the model but differ")
    return faults


def _kind(dtype: torch.dtype, shape: Shape) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"
