"""A checkpoint is whole or absent, of this model or refused, and does not know of stages."""

import hashlib
import json
import re
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import penstock
from penstock.checkpoint.files import digest_of
from penstock.errors import CheckpointError
from penstock_recipes.train.weights import mean_weights, tensor_names
from penstock_recipes.zoo.resnet import residual_network
from tests.distributed.launch import begin_python, run_python
from tests.model_parts import Masters, Noted, Noting, noted_pipeline

Damage = Callable[[Path], Any]


def small(width: int = 4) -> nn.Sequential:
    """Make a model with BatchNorm buffers, the same at every call."""
    torch.manual_seed(0)
    return residual_network(1, width)


def trained(
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW, **options: Any
) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Give a model and its optimizer after two steps."""
    model = small()
    optimizer = kind(model.parameters(), lr=0.1, **options)
    for _ in range(2):
        train_step(model, optimizer)
    return model, optimizer


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Take one step in plain torch; dropout draws from a fixed seed."""
    torch.manual_seed(1)
    model(torch.rand(4, 1, 8, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def equal(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def copy_of(model: nn.Module) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in model.state_dict().items() if isinstance(t, Tensor)}


@pytest.mark.parametrize(
    "kind, options",
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"amsgrad": True, "betas": (0.8, 0.9)}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.SGD, {}),
        (torch.optim.Adam, {"capturable": False, "lr_as_tensor": True}),
    ],
)
def test_a_loaded_run_goes_on_bit_by_bit(tmp_path, kind, options) -> None:
    as_tensor = options.pop("lr_as_tensor", False)
    model, optimizer = trained(kind, **options)
    if as_tensor:
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    penstock.save_checkpoint(tmp_path / "c", model, optimizer)
    twin = small()
    fresh = kind(twin.parameters(), lr=torch.tensor(7.0) if as_tensor else 7.0)
    penstock.load_checkpoint(tmp_path / "c", twin, fresh)
    assert equal(model, twin)
    assert type(fresh.param_groups[0]["lr"]) is type(optimizer.param_groups[0]["lr"])
    train_step(model, optimizer)
    train_step(twin, fresh)
    assert equal(model, twin)


def test_state_of_another_type_than_its_parameter_comes_back_to_the_bit(tmp_path: Path) -> None:
    """Its keys hold a dot and a percent sign, too."""

    def made() -> tuple[nn.Module, Masters]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).bfloat16()
        return model, Masters(model.parameters())

    model, optimizer = made()
    for _ in range(2):
        model(torch.ones(3, 4, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    penstock.save_checkpoint(tmp_path / "c", model, optimizer)
    twin, fresh = made()
    penstock.load_checkpoint(tmp_path / "c", twin, fresh)
    for one, other in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert one.keys() == other.keys()
        assert other["steps.taken"] == 2
        assert other["master.50%"].dtype is torch.float32
        assert torch.equal(one["master.50%"], other["master.50%"])


def test_the_unsplit_model_loads_it_with_plain_torch(tmp_path: Path) -> None:
    model, _ = trained()
    with penstock.Pipeline(model, num_stages=3, num_microbatches=1) as pipe:
        penstock.save_checkpoint(tmp_path / "c", pipe)
    twin = small()
    twin.load_state_dict(load_file(tmp_path / "c" / "model.safetensors"))
    assert equal(model, twin)


def test_it_holds_the_step_and_seed_of_a_pipeline(tmp_path: Path) -> None:
    with penstock.Pipeline(small(), num_stages=2, seed=5, num_microbatches=1) as pipe:
        pipe.step = 17
        penstock.save_checkpoint(tmp_path / "c", pipe)
    with penstock.Pipeline(small(), num_stages=3, seed=0, num_microbatches=1) as other:
        penstock.load_checkpoint(tmp_path / "c", other)
        assert (other.step, other.seed) == (17, 5)


def test_the_state_comes_back_as_json_gives_it(tmp_path: Path) -> None:
    state: dict[str, Any] = {"epoch": 3, "loss": 0.1, "pair": (1, 2), "map": {10: "a", 9: None}}
    penstock.save_checkpoint(tmp_path / "c", small(), **state)
    assert penstock.load_checkpoint(tmp_path / "c", small()) == json.loads(json.dumps(state))


def test_a_shared_tensor_is_stored_under_both_names_and_loaded_as_one(tmp_path: Path) -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[1].weight = model[0].weight
        return model

    model, twin = tied(), tied()
    penstock.save_checkpoint(tmp_path / "c", model)
    penstock.load_checkpoint(tmp_path / "c", twin)
    assert equal(model, twin) and twin[0].weight is twin[1].weight
    twin.load_state_dict(load_file(tmp_path / "c" / "model.safetensors"))
    untied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    penstock.save_checkpoint(tmp_path / "untied", untied)
    with pytest.raises(CheckpointError, match=r"1\.weight and 0\.weight are one tensor"):
        penstock.load_checkpoint(tmp_path / "untied", twin)


def test_a_tensor_that_is_a_view_or_not_contiguous_is_saved(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    model.weight = nn.Parameter(torch.randn(6, 8).t()[1:3, 2:5])
    penstock.save_checkpoint(tmp_path / "c", model)
    twin = nn.Linear(3, 2)
    penstock.load_checkpoint(tmp_path / "c", twin)
    assert equal(model, twin)


# -- whole or absent


def test_an_existing_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    penstock.save_checkpoint(tmp_path / "c", small(), epoch=1)
    with pytest.raises(CheckpointError, match="exists already and is never overwritten"):
        penstock.save_checkpoint(tmp_path / "c", small(), epoch=2)
    assert penstock.load_checkpoint(tmp_path / "c", small()) == {"epoch": 1}


def test_a_saved_checkpoint_is_all_that_a_save_leaves(tmp_path: Path) -> None:
    penstock.save_checkpoint(tmp_path / "c", *trained())
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    assert {path.name for path in (tmp_path / "c").iterdir()} == (
        {"model.safetensors", "optimizer.safetensors", "state.json"}
    )


@pytest.mark.slow
def test_a_process_killed_while_it_saves_leaves_no_broken_checkpoint(tmp_path: Path) -> None:
    program = (
        "import itertools, sys, penstock\n"
        "from torch import nn\n"
        "model = nn.Linear(300, 300)\n"
        "for n in itertools.count():\n"
        "    penstock.save_checkpoint(f'{sys.argv[1]}/c{n}', model)\n"
    )
    saving, deadline = begin_python("-c", program, str(tmp_path)), time.monotonic() + 60
    while not (tmp_path / "c3").exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    saving.kill()
    said, _ = saving.communicate()
    whole = [path for path in tmp_path.iterdir() if not path.name.endswith(".unfinished")]
    assert len(whole) > 3, said
    for path in whole:
        penstock.load_checkpoint(path, nn.Linear(300, 300))


@pytest.mark.parametrize("value", [object(), {1, 2}, torch.zeros(1)])
def test_a_state_that_is_no_json_leaves_nothing_behind(tmp_path: Path, value: object) -> None:
    with pytest.raises(CheckpointError, match="holds what JSON cannot"):
        penstock.save_checkpoint(tmp_path / "c", small(), value=value)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_leaves_nothing_behind_and_says_so(tmp_path: Path) -> None:
    program = (
        "import resource, sys, penstock\n"
        "from torch import nn\n"
        "most = (2000, resource.getrlimit(resource.RLIMIT_FSIZE)[1])\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, most)\n"
        "try:\n"
        "    penstock.save_checkpoint(sys.argv[1], nn.Linear(100, 100))\n"
        "except penstock.PenstockError as error:\n"
        "    print(error)\n"
    )
    said = run_python("-c", program, str(tmp_path / "c")).output
    assert re.match(r"cannot write the checkpoint .*; nothing is left of it", said)
    assert list(tmp_path.iterdir()) == []


NOTES = ({"seen": [1, 2.5, None]}, torch.arange(3), "of all")


@pytest.mark.parametrize("saved_by", [lambda model: model, noted_pipeline], ids=["plain", "pipe"])
@pytest.mark.parametrize("loaded_by", [lambda model: model, noted_pipeline], ids=["plain", "pipe"])
def test_extra_state_comes_back_as_it_was(tmp_path, saved_by, loaded_by) -> None:
    model, twin = Noted(*NOTES), Noted()
    penstock.save_checkpoint(tmp_path / "c", saved_by(model))
    penstock.load_checkpoint(tmp_path / "c", loaded_by(twin))
    assert equal(twin.first.norm, model.first.norm)
    assert (twin.first.note, twin.note) == (NOTES[0], NOTES[2])
    assert torch.equal(twin.second.note, NOTES[1])
    assert (len(twin.first.given), len(twin.second.given)) == (1, 1)


def test_an_exported_model_has_its_extra_state_too(tmp_path: Path) -> None:
    model, file = Noted(*NOTES), tmp_path / "m.safetensors"
    penstock.save_checkpoint(tmp_path / "c", model)
    penstock.export_model(tmp_path / "c", file)
    assert torch.equal(load_file(file)["second._extra_state"], NOTES[1])
    with safe_open(file, framework="pt") as opened:
        noted = json.loads(opened.metadata()["extra_state"])
    assert noted == {"first._extra_state": NOTES[0], "_extra_state": NOTES[2]}


@pytest.mark.parametrize("note", [{1, 2}, (1, 2), {1: 2}, [float("nan")], {"t": torch.ones(1)}])
def test_extra_state_that_a_file_would_change_is_refused_before_anything_is_written(
    tmp_path: Path, note: object
) -> None:
    pipe = noted_pipeline(Noted(None, note))
    said = (
        rf"second\._extra_state: get_extra_state of Noting returned a {type(note).__name__} that"
    )
    for save in (penstock.save_checkpoint, penstock.save_pretrained):
        with pytest.raises(CheckpointError, match=said):
            save(tmp_path / "c", pipe)
    assert list(tmp_path.iterdir()) == []


def test_extra_state_that_is_missing_or_has_no_place_is_refused(tmp_path: Path) -> None:
    penstock.save_checkpoint(tmp_path / "with", Noting(2, "note"))
    model = Noting(2, "as it was")
    penstock.save_checkpoint(tmp_path / "without", nn.ModuleDict(dict(model.named_children())))
    with pytest.raises(CheckpointError, match=r"  _extra_state is missing"):
        penstock.load_checkpoint(tmp_path / "without", model)
    assert model.note == "as it was"
    with pytest.raises(CheckpointError, match=r"  _extra_state is not in the model"):
        penstock.load_checkpoint(tmp_path / "with", nn.ModuleDict(dict(model.named_children())))


def test_extra_state_that_cannot_be_set_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    class Giving(nn.Linear):
        def get_extra_state(self) -> object:
            return 1

    penstock.save_checkpoint(tmp_path / "c", Giving(2, 2))
    model = Giving(2, 2)
    before = copy_of(model)
    with pytest.raises(CheckpointError, match="Giving has get_extra_state and no set_extra_state"):
        penstock.load_checkpoint(tmp_path / "c", model)
    assert all(torch.equal(t, before[n]) for n, t in model.named_parameters())


# -- damaged


def cut_short(path: Path) -> None:
    """Lose the second half of a file."""
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def flip_bit(path: Path) -> None:
    """Change the last bit but a few."""
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(bytes(content))


def rate_changed_by_hand(state: Path) -> None:
    """Change a learning rate by hand."""
    state.write_text(state.read_text().replace('"lr": 0.1', '"lr": 0.2'))


def digest_changed_by_hand(state: Path) -> None:
    """Exchange a file by hand, with its digest."""
    file, text = state.with_name("model.safetensors"), state.read_text()
    before = hashlib.sha256(file.read_bytes()).hexdigest()
    flip_bit(file)
    assert before in text
    state.write_text(text.replace(before, hashlib.sha256(file.read_bytes()).hexdigest()))


FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
BY_MACHINE: tuple[Damage, ...] = (cut_short, flip_bit, Path.unlink)
DAMAGED: list[tuple[Damage, str, str]] = [
    *product(BY_MACHINE, FILES, ("",)),
    (rate_changed_by_hand, "state.json", " is damaged: its digest is not"),
    (digest_changed_by_hand, "state.json", " is damaged: its digest is not"),
]


@pytest.mark.parametrize("damage, name, said", DAMAGED)
def test_a_damaged_file_is_named_and_nothing_is_loaded(tmp_path, damage, name, said) -> None:
    model, optimizer = trained()
    penstock.save_checkpoint(tmp_path / "c", *trained())
    train_step(model, optimizer)
    before = copy_of(model)
    damage(tmp_path / "c" / name)
    with pytest.raises(CheckpointError, match=re.escape(name) + said):
        penstock.load_checkpoint(tmp_path / "c", model, optimizer)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_the_files_of_weights_are_verified_once_however_many_tensors_they_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(40)))
    for number in range(2):
        penstock.save_checkpoint(tmp_path / str(number), model)
    seen: list[str] = []
    digest = hashlib.file_digest

    def noting(file: Any, algorithm: str) -> Any:
        seen.append(file.name)
        return digest(file, algorithm)

    monkeypatch.setattr(hashlib, "file_digest", noting)
    found = mean_weights([tmp_path / "0", tmp_path / "1"], tensor_names(model))
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in found)
    assert sorted(seen) == [str(tmp_path / n / "model.safetensors") for n in "01"]


# -- foreign

OURS = {"format": "penstock-checkpoint"}


def write_state(path: Path, **state: Any) -> None:
    path.mkdir()
    (path / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda path: None, "does not exist; give the folder of a checkpoint"),
        (lambda path: path.write_text("x"), "is a file; give the folder of a checkpoint"),
        (Path.mkdir, r"holds no state\.json, so it is no Penstock checkpoint"),
        (lambda path: write_state(path, a=1), "was not written by Penstock"),
        (lambda path: write_state(path, **OURS, version=99), "version 99, this Penstock reads"),
        (
            lambda path: write_state(path, **OURS, version=1, digests=None),
            r"state\.json is damaged",
        ),
    ],
)
def test_what_is_no_checkpoint_is_refused(tmp_path: Path, make: Damage, message: str) -> None:
    make(tmp_path / "c")
    with pytest.raises(CheckpointError, match=message):
        penstock.load_checkpoint(tmp_path / "c", small())


def test_a_checkpoint_of_version_1_loads(tmp_path: Path) -> None:
    model = small()
    penstock.save_checkpoint(tmp_path / "c", model, epoch=3)
    file = tmp_path / "c" / "state.json"
    state = json.loads(file.read_text())
    del state["facts"]["slices"]  # which it did not know
    digests = {name: x for name, x in state["digests"].items() if name != "state.json"}
    state["digests"]["state.json"] = digest_of([state["facts"], digests])
    file.write_text(json.dumps(state | {"version": 1}))
    other = small()
    with torch.no_grad():
        next(other.parameters()).add_(1.0)
    assert penstock.load_checkpoint(tmp_path / "c", other) == {"epoch": 3}
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_every_tensor_that_does_not_fit_is_listed_and_none_is_loaded(tmp_path: Path) -> None:
    penstock.save_checkpoint(
        tmp_path / "c", nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 3).double()})
    )
    model = nn.ModuleDict({"b": nn.Linear(2, 2), "c": nn.Linear(1, 1)})
    before = copy_of(model)
    with pytest.raises(CheckpointError) as caught:
        penstock.load_checkpoint(tmp_path / "c", model)
    lines = [line.strip() for line in str(caught.value).splitlines()[1:]]
    assert sorted(lines) == [
        "a.bias is not in the model",
        "a.weight is not in the model",
        "b.bias is float64 [3], the model's is float32 [2]",
        "b.weight is float64 [3, 2], the model's is float32 [2, 2]",
        "c.bias is missing",
        "c.weight is missing",
    ]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_another_optimizer_is_refused_before_the_model_is_touched(tmp_path: Path) -> None:
    penstock.save_checkpoint(tmp_path / "c", *trained())
    model = small()
    before = copy_of(model)
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointError, match="the optimizer is SGD, the saved one AdamW"):
        penstock.load_checkpoint(tmp_path / "c", model, other)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_parameter_groups_must_hold_the_same_parameters(tmp_path: Path) -> None:
    penstock.save_checkpoint(tmp_path / "c", *trained())
    model = small()
    fewer = torch.optim.AdamW(list(model.parameters())[1:])
    with pytest.raises(CheckpointError, match=r"group 0 lacks stem\.weight and has beyond"):
        penstock.load_checkpoint(tmp_path / "c", model, fewer)
    halves = [{"params": [p]} for p in model.parameters()]
    with pytest.raises(CheckpointError, match=r"has \d+ parameter groups, the saved one 1"):
        penstock.load_checkpoint(tmp_path / "c", model, torch.optim.AdamW(halves))


def test_an_optimizer_that_is_not_the_models_or_was_not_saved_is_refused(tmp_path: Path) -> None:
    model, optimizer = trained()
    with pytest.raises(CheckpointError, match="that is not the model's; make the optimizer from"):
        penstock.save_checkpoint(tmp_path / "c", small(), optimizer)
    penstock.save_checkpoint(tmp_path / "c", model)
    with pytest.raises(CheckpointError, match="saved without an optimizer; load it without one"):
        penstock.load_checkpoint(tmp_path / "c", model, optimizer)


def test_a_save_beside_the_training_holds_what_was_there_when_it_began(tmp_path: Path) -> None:
    model, optimizer = trained()
    before = copy_of(model)
    saving = penstock.async_save_checkpoint(tmp_path / "c", model, optimizer, note=1)
    for _ in range(3):
        train_step(model, optimizer)
    saving.wait()
    saving.wait()  # once more is harmless
    assert saving.path == tmp_path / "c"
    twin = small()
    fresh = torch.optim.AdamW(twin.parameters())
    assert penstock.load_checkpoint(tmp_path / "c", twin, fresh) == {"note": 1}
    assert all(torch.equal(before[name], tensor) for name, tensor in twin.state_dict().items())
    for _ in range(3):
        train_step(twin, fresh)
    assert equal(model, twin)


def test_a_save_that_goes_wrong_says_so_when_waited_for(tmp_path: Path) -> None:
    model = small()
    saving = penstock.async_save_checkpoint(Path("/proc/no-place/c"), model)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="cannot write the checkpoint"):
            saving.wait()
    penstock.save_checkpoint(tmp_path / "c", model)
    with pytest.raises(CheckpointError, match="exists already"):
        penstock.async_save_checkpoint(tmp_path / "c", model)


def test_schedulers_and_scalers_are_state_like_any_other(tmp_path: Path) -> None:
    model, optimizer = trained()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
    train_step(model, optimizer)
    scheduler.step()
    penstock.save_checkpoint(tmp_path / "c", model, optimizer, scheduler=scheduler.state_dict())
    twin = small()
    fresh = torch.optim.AdamW(twin.parameters(), lr=0.1)
    later = torch.optim.lr_scheduler.CosineAnnealingLR(fresh, T_max=10)
    later.load_state_dict(penstock.load_checkpoint(tmp_path / "c", twin, fresh)["scheduler"])
    for a, b in ((model, optimizer), (twin, fresh)):
        train_step(a, b)
    scheduler.step()
    later.step()
    assert equal(model, twin)
    assert scheduler.get_last_lr() == later.get_last_lr()
