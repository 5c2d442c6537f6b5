"""Folders of weights, a process for each stage; called in each process."""

import json
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import penstock
from penstock.checkpoint.pretrained import folder
from penstock.checkpoint.pretrained.folder import INDEX
from penstock.errors import CheckpointError
from penstock.model.capture.stages import CutModel
from tests.model.capture.running import captured_of
from tests.pretrained import BATCH, build, even_cut, layers_of, logits_of


def spread(mesh: penstock.Mesh, name: str, **options: Any) -> penstock.Pipeline:
    """Make a pipeline of a model on the meta device."""
    layers = layers_of(build(name, device="meta"))
    given: dict[str, Any] = {"num_microbatches": 1, "threads_per_stage": 1, **options}
    partition = even_cut(layers, mesh.num_stages)
    return penstock.Pipeline(layers, mesh=mesh, partition=partition, **given)


def held(pipe: penstock.Pipeline) -> int:
    """Count the values of parameters that this process has memory for."""
    return sum(p.numel() for p in pipe.original.parameters() if not p.is_meta)


def own_names(mesh: penstock.Mesh, name: str) -> set[str]:
    layers = layers_of(build(name, device="meta"))
    partition = even_cut(layers, mesh.num_stages)
    cut = CutModel(captured_of(layers), tuple(partition))
    foreign = [n for s in range(len(partition)) if s != mesh.stage for n in cut.names_of(s)]
    assert layers.model is not None
    return set(layers.model.state_dict()) - set(foreign)


def only_own_files(mesh: penstock.Mesh, name: str, whole: Path) -> Path:
    """Copy a folder without the files that this process has no use for."""
    mine = whole.with_name(f"of-{mesh.rank}")
    shutil.copytree(whole, mine)
    files = json.loads((mine / INDEX).read_text())["weight_map"]
    own = own_names(mesh, name)
    for file in set(files.values()) - {file for tensor, file in files.items() if tensor in own}:
        (mine / file).unlink()
    return mine


@contextmanager
def noting_reads() -> Iterator[list[str]]:
    """Note the names of all tensors that are read from files inside."""
    read: list[str] = []
    plain = vars(folder)["safe_open"]

    class Noting:  # an open file
        def __init__(self, *args: Any, **options: Any) -> None:
            self.file = plain(*args, **options)

        def __enter__(self) -> Any:
            opened = self.file.__enter__()
            return SimpleNamespace(
                keys=opened.keys, get_slice=opened.get_slice, get_tensor=self.get_tensor
            )

        def get_tensor(self, name: str) -> Tensor:
            read.append(name)
            tensor: Tensor = self.file.get_tensor(name)
            return tensor

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

    setattr(folder, "safe_open", Noting)  # noqa: B010 - typed as a class of its own
    try:
        yield read
    finally:
        setattr(folder, "safe_open", plain)  # noqa: B010


def load_and_save(mesh: penstock.Mesh, names: list[str], source: str) -> list[dict[str, Any]]:
    """Load SOURCE/NAME without the files that only others need; save it at NAME-again."""
    found = []
    for name in names:
        whole = Path(source) / name
        mine = only_own_files(mesh, name, whole)
        told: dict[str, Any] = {"num_files": len([*mine.glob("*.safetensors")])}
        with noting_reads() as read:
            pipe = spread(mesh, name, weights=mine)
        told |= {"held": held(pipe), "text": repr(pipe), "read": read}
        inputs = build(name)[1](BATCH)
        told["logits"] = logits_of(pipe.eval_step(inputs if mesh.stage == 0 else None)).clone()
        penstock.save_pretrained(whole.with_name(f"{name}-again"), pipe)
        with torch.no_grad():
            for parameter in pipe.parameters():
                parameter.zero_()
        told["unknown"] = penstock.load_pretrained(mine, pipe)
        again = logits_of(pipe.eval_step(inputs if mesh.stage == 0 else None))
        assert torch.equal(again, told["logits"]), name
        shutil.rmtree(mine)
        found.append(told)
    return found


def draw(mesh: penstock.Mesh | None, names: list[str]) -> list[dict[str, Tensor]]:
    """Give what each process has of models whose values are drawn."""
    assert mesh is not None
    return [values(spread(mesh, name, seed=5)) for name in names]


def values(pipe: penstock.Pipeline) -> dict[str, Tensor]:
    model = pipe.original
    everything: Iterable[tuple[str, Tensor]] = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in everything if not tensor.is_meta}


def refuse(mesh: penstock.Mesh, name: str, source: str) -> list[str]:
    """Try folders that do not fit; give what is said, and try again in the same mesh."""
    said = []
    pipe = spread(mesh, name, seed=mesh.num_stages)
    before = values(pipe)
    for kind in ("nowhere", "unfit"):
        try:
            penstock.load_pretrained(Path(source) / kind, pipe)
        except CheckpointError as error:
            said.append(str(error))
    try:
        penstock.save_pretrained(Path(source) / "unfit", pipe)
    except CheckpointError as error:
        said.append(str(error))
    after = values(pipe)
    assert all(torch.equal(before[n], after[n]) for n in before)
    penstock.load_pretrained(Path(source) / name, pipe)
    try:
        spread(mesh, name, weights=Path(source) / "unfit")
    except CheckpointError as error:
        said.append(str(error))
    return said


def train(mesh: penstock.Mesh, name: str, source: str) -> list[float]:
    options: dict[str, Any] = {"num_microbatches": 2, "schedule": penstock.schedules.one_f_one_b}
    pipe = spread(mesh, name, weights=Path(source) / name, loss=loss, **options)
    inputs_of = build(name)[1]
    losses = take_steps(pipe, inputs_of(BATCH) if mesh.stage == 0 else None)
    penstock.save_pretrained(Path(source) / "trained", pipe)
    return losses


def take_steps(pipe: penstock.Pipeline, inputs: Any) -> list[float]:
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
    losses = []
    for _ in range(3):
        losses.append(pipe.train_step(inputs, torch.zeros(BATCH)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def loss(output: Any, _target: Tensor) -> Tensor:
    """Give a number that all logits count for."""
    return logits_of(output).square().mean()


def save_from_replicas(mesh: penstock.Mesh, source: str) -> None:
    """Load and save GPT-2 in a mesh with replicas."""
    pipe = spread(mesh, "gpt2", weights=Path(source) / "gpt2")
    penstock.save_pretrained(Path(source) / "again", pipe)
