"""A checkpoint names files of its own folder only, and holds types that its files have not."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.checkpoint.files import digest_of
from penstock.checkpoint.reader import Piece, read_pieces
from penstock.errors import CheckpointError
from penstock.sharding.layouts import Slice


class Turning(nn.Module):
    """Turns complex numbers; one of its parameters has no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128))
        self.phase = nn.Parameter(torch.randn((), dtype=torch.complex128))
        self.register_buffer("narrow", torch.randn(2, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex128) @ (self.turn * self.phase)).abs()


def trained() -> tuple[Turning, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Turning()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_complex_numbers_of_128_bits_come_back_to_the_bit(tmp_path: Path) -> None:
    model, optimizer = trained()
    penstock.save_checkpoint(tmp_path / "c", model, optimizer)
    twin = Turning()
    fresh = torch.optim.AdamW(twin.parameters())
    penstock.load_checkpoint(tmp_path / "c", twin, fresh)
    for (name, one), other in zip(
        model.state_dict().items(), twin.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other), name
    for mine, theirs in zip(optimizer.state.values(), fresh.state.values(), strict=True):
        assert theirs["exp_avg"].dtype is torch.complex128
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])


def test_a_slice_of_complex_numbers_is_read_as_one(tmp_path: Path) -> None:
    model, _ = trained()
    penstock.save_checkpoint(tmp_path / "c", model)
    own = Slice((1, 1), (2, 2), (4, 3))
    pieces = {"turn": (Piece("model.safetensors"),)}
    found, wholes = read_pieces(tmp_path / "c", pieces, {"turn": own})
    assert torch.equal(found["turn"], model.turn.detach()[1:3, 1:3])
    assert wholes == {"turn": (4, 3)}


def test_files_for_others_refuse_what_they_would_hold_as_pairs(tmp_path: Path) -> None:
    model, _ = trained()
    penstock.save_checkpoint(tmp_path / "c", model)
    with pytest.raises(CheckpointError, match=r"'turn' is complex128.*convert it to complex64"):
        penstock.export_model(tmp_path / "c", tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is complex128"):
        penstock.save_pretrained(
            tmp_path / "p", penstock.Pipeline([model], num_stages=1, num_microbatches=1)
        )
    assert not (tmp_path / "p").exists()


def note(path: Path, change: Callable[[dict[str, Any]], object], key: str) -> None:
    """Change what state.json names, under a true digest."""
    state = json.loads((path / "state.json").read_text())
    digests = {name: x for name, x in state["digests"].items() if name != "state.json"}
    change(digests if key == "digests" else state["facts"].setdefault(key, {}))
    state["digests"] = {**digests, "state.json": digest_of([state["facts"], digests])}
    (path / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize("key", ("digests", "files", "slices"))
@pytest.mark.parametrize("name", ("../outside.safetensors", "/etc/hostname", "model/../../x"))
def test_a_checkpoint_that_names_a_file_elsewhere_is_refused(tmp_path, key, name) -> None:
    model = nn.Linear(2, 2)
    penstock.save_checkpoint(tmp_path / "c", model)
    note(tmp_path / "c", lambda names: names.update({name: {}}), key)
    with pytest.raises(CheckpointError, match="outside of the folder; it may name files of its"):
        penstock.load_checkpoint(tmp_path / "c", model)
    with pytest.raises(CheckpointError, match="outside of the folder"):
        penstock.export_model(tmp_path / "c", tmp_path / "model.safetensors")


def test_a_link_out_of_a_checkpoint_is_refused_and_one_inside_is_not(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    penstock.save_checkpoint(tmp_path / "c", model)
    file = tmp_path / "c" / "model.safetensors"
    file.rename(tmp_path / "c" / "blob")
    file.symlink_to("blob")
    penstock.load_checkpoint(tmp_path / "c", model)
    (tmp_path / "c" / "blob").rename(tmp_path / "blob")
    file.unlink()
    file.symlink_to("../blob")
    with pytest.raises(CheckpointError, match=r"'model\.safetensors', which is outside"):
        penstock.load_checkpoint(tmp_path / "c", model)


class Noisy(nn.Module):
    """Draws in evaluation too."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, 0.5, training=True)


def test_evaluations_after_a_resume_draw_what_they_would_have_drawn(tmp_path: Path) -> None:
    x = torch.ones(4, 6)
    whole, resumed = (
        penstock.Pipeline([nn.Linear(6, 6), Noisy()], num_stages=2, num_microbatches=1)
        for _ in range(2)
    )
    drawn = [whole.eval_step(x) for _ in range(3)]
    assert not torch.equal(drawn[0] != 0, drawn[2] != 0)
    penstock.save_checkpoint(tmp_path / "c", whole)
    expected = whole.eval_step(x)
    penstock.load_checkpoint(tmp_path / "c", resumed)
    assert torch.equal(resumed.eval_step(x), expected)
