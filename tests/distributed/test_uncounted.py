"""A batch of which nothing counts is refused on every process alike, and the next one trains."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import penstock
from penstock.errors import UncountedError
from tests.distributed.call import call

IGNORED = -100


def tokens(target: Tensor) -> Tensor:
    return (target != IGNORED).sum()


def batch(*, counts: bool) -> tuple[Tensor, Tensor]:
    torch.manual_seed(2)
    x, target = torch.randn(4, 3), torch.tensor([0, IGNORED, 2, 1])
    return x, target if counts else torch.full_like(target, IGNORED)


def pipeline(mesh: penstock.Mesh | None) -> penstock.Pipeline:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    loss = nn.CrossEntropyLoss(ignore_index=IGNORED)
    options: dict[str, Any] = {"num_microbatches": 2, "reduction": tokens, "threads_per_stage": 1}
    return penstock.Pipeline(layers, 2, mesh=mesh, loss=loss, **options)


def goes_on(mesh: penstock.Mesh) -> tuple[str, Tensor, dict[str, Tensor | None]]:
    """Train on nothing, then on a batch; the last stage alone is given targets."""
    pipe, refused = pipeline(mesh), ""
    is_last = mesh.stage == mesh.num_stages - 1
    for counts in (True, False, True):
        x, target = batch(counts=counts)
        try:
            loss = pipe.train_step(x, target if is_last else None)
        except UncountedError as error:
            refused = str(error)
    assert not mesh.background.watch.knows_failure  # nobody was told that a process ends
    return refused, loss, {name: p.grad for name, p in pipe.named_parameters()}


def test_processes_go_on_after_a_batch_of_which_nothing_counts(tmp_path: Path) -> None:
    found = call(goes_on, (2, 1), tmp_path)
    with pipeline(None) as pipe:
        for _ in range(2):
            expected = pipe.train_step(*batch(counts=True))
        gradients = {name: p.grad for name, p in pipe.named_parameters()}
    for refused, loss, mine in found:
        assert "is there a real token" in refused and torch.equal(loss, expected)
        for name, gradient in mine.items():
            torch.testing.assert_close(gradient, gradients.pop(name), rtol=0, atol=0)
    assert not gradients
