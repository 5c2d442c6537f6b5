"""A loss over the outputs of `pipe(inputs)`, in processes: the bits of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import Pipeline
from penstock.errors import PenstockError
from penstock.mesh import Mesh

from .call import call

N = 6


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    tail = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 4)]
    return [nn.Linear(5, 8), nn.Dropout(0.1), nn.Tanh(), *tail]


def batch(number: int) -> Tensor:
    return torch.randn(N, 5, generator=torch.Generator().manual_seed(number))


def contrastive(left: Tensor, right: Tensor) -> Tensor:
    """A loss that needs every sample: each row of one view finds its partner among all others."""
    return F.cross_entropy(left @ right.T, torch.arange(len(left)))


def gradients(pipe: Pipeline) -> dict[str, Tensor]:
    return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


def buffers(pipe: Pipeline) -> dict[str, Tensor]:
    return dict(pipe.named_buffers())


def two_views(pipe: Pipeline, *, has_outputs: bool) -> Tensor:
    left, right = pipe(batch(1)), pipe(batch(2))
    loss = contrastive(left, right) if has_outputs else left + right
    loss.backward()
    return loss.detach()


CASES = (("1f1b", "all"), ("zb-h1", "last"))
"""Schedules, and on which ranks outputs are."""


def of_stages(mesh: Mesh) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for schedule, where in CASES:
        options: dict[str, Any] = {"mesh": mesh, "num_microbatches": 3}
        options |= {"schedule": schedule, "outputs": where}
        with Pipeline(layers(), **options) as pipe:
            has_outputs = where == "all" or mesh.stage == mesh.num_stages - 1
            losses = [two_views(pipe, has_outputs=has_outputs) for _ in range(2)]
            grads = gradients(pipe), buffers(pipe)
            found[schedule, where] = losses, *grads, has_outputs, pipe.eval_step(batch(3))
    return found


def in_two_processes(mesh: Mesh) -> tuple[dict[tuple[str, str], Any], dict[str, str]]:
    return of_stages(mesh), of_mistakes(mesh)


@pytest.fixture(scope="module")
def found_by_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return call(in_two_processes, (2, 1), tmp_path_factory.mktemp("outputs"))


def test_a_loss_that_needs_all_samples_gives_the_bits_of_one_process(found_by_ranks: Any) -> None:
    ranks = [found for found, _ in found_by_ranks]
    for schedule, where in CASES:
        with Pipeline(layers(), num_stages=1, num_microbatches=3, schedule=schedule) as pipe:
            expected_losses = [two_views(pipe, has_outputs=True) for _ in range(2)]
            expected, moved, outputs = gradients(pipe), buffers(pipe), pipe.eval_step(batch(3))
        names: set[str] = set()
        for found in ranks:
            losses, grads, stats, has_outputs, evaluated = found[schedule, where]
            assert not has_outputs or all(map(torch.equal, losses, expected_losses))
            assert has_outputs or losses == [0.0, 0.0]
            for name, gradient in grads.items():
                assert torch.equal(gradient, expected[name]), (where, name)
            assert all(torch.equal(stats[name], moved[name]) for name in stats)
            assert torch.equal(evaluated, outputs)
            names |= grads.keys()
        assert names == expected.keys()


def of_replicas(mesh: Mesh) -> dict[str, Tensor]:
    modules = [m for m in layers() if isinstance(m, nn.Linear | nn.Tanh)]
    with Pipeline(modules, mesh=mesh, num_microbatches=2) as pipe:
        for number in (1, 2):  # the second adds to the first's gradients
            pipe(batch(number)[mesh.replica :: 2]).square().mean().backward()
        return gradients(pipe)


def test_replicas_average_their_losses(tmp_path: Path) -> None:
    first, second = call(of_replicas, (1, 2), tmp_path)
    whole = nn.Sequential(*(m for m in layers() if isinstance(m, nn.Linear | nn.Tanh)))
    for number in (1, 2):
        whole(batch(number)).square().mean().backward()
    for name, parameter in whole.named_parameters():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], parameter.grad)


def said_by(run: Any) -> str:
    try:
        run()
    except PenstockError as error:
        return str(error)
    return ""


def of_mistakes(mesh: Mesh) -> dict[str, str]:
    pipe = Pipeline(layers(), mesh=mesh, num_microbatches=2, loss=F.mse_loss)
    is_other, y = mesh.rank == 1, torch.zeros(N, 4)

    def another_loss() -> None:
        (pipe(batch(1)) * (2.0 if is_other else 1.0)).square().mean().backward()

    def another_order() -> None:
        outputs = [pipe(batch(1)), pipe(batch(2))]
        outputs[is_other].square().mean().backward()

    def no_backward() -> None:
        loss = pipe(batch(1)).square().mean()
        if is_other:
            pipe.train_step(batch(1), y)
        else:
            loss.backward()

    def no_gradients() -> None:
        with torch.set_grad_enabled(not is_other):
            pipe(batch(1))

    mistakes = (another_loss, another_order, no_backward, no_gradients)
    said = {mistake.__name__: said_by(mistake) for mistake in mistakes}
    return said | {"fine": said_by(lambda: pipe(batch(1)).square().mean().backward())}


def test_what_every_rank_must_call_is_checked_and_the_mesh_lives_on(found_by_ranks: Any) -> None:
    first, second = (said for _, said in found_by_ranks)
    assert first == second
    assert first["another_loss"].startswith("ranks 0 and 1 computed different losses: their grad")
    assert "rank 0 runs the backward of call 3, rank 1 that of call 4" in first["another_order"]
    began = "rank 0 began backward() of pipe(inputs) and rank 1 began train_step"
    assert began in first["no_backward"]
    assert "rank 0 began pipe(inputs) and rank 1 began eval_step" in first["no_gradients"]
    assert first["fine"] == ""
