"""Gradients of weights that several processes share: hooks on them are given the step's sum, what
was left from before is added to, and what cannot be summed is refused.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.errors import ConfigError
from penstock.mesh.watch import Watch
from penstock.planner.placement import Placement
from penstock.runtime import replicas
from penstock.runtime.pipeline_module import parts_of
from penstock.runtime.shards import at_rest
from penstock.schedules import pipedream_2bw
from tests.distributed.call import call

X, Y = torch.randn(2, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
LAYOUTS = {"replicas": Placement.of(range(1), 2), "shards": Placement.of(range(1), num_shards=2)}


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()


def found(of: nn.Module, calls: list[str]) -> None:
    """Hook a model where gradients are found: a clamp, a norm, and one that is gone after once."""
    first, first_bias, last, _ = of.parameters()

    def clamped(gradient: Tensor) -> Tensor:
        calls.append("found")
        return gradient.clamp(-0.01, 0.01)

    def once(gradient: Tensor) -> None:
        calls.append("once")
        handle.remove()

    first.register_hook(clamped)
    last.register_hook(lambda gradient: gradient / gradient.norm())
    last.register_hook(lambda gradient: gradient + 1)
    handle = first_bias.register_hook(once)


def added(of: nn.Module, calls: list[str]) -> None:
    """Hook a model where gradients were added: one that steps at once."""

    def stepped(parameter: Tensor) -> None:
        calls.append("added")
        assert parameter.grad is not None
        parameter.sub_(parameter.grad.sign(), alpha=0.5)

    of.get_parameter("0.weight").register_post_accumulate_grad_hook(stepped)


def left_from_before(of: nn.Module, calls: list[str]) -> None:
    for number, parameter in enumerate(of.parameters()):
        parameter.grad = torch.full_like(parameter, number)


def unsplit(marks: list[str]) -> tuple[list[str], dict[str, Tensor]]:
    """Train on two whole batches."""
    alone, calls = model(), list[str]()
    for mark in marks:
        MARKS[mark](alone, calls)
    for _ in range(2):
        nn.functional.mse_loss(alone(X), Y).backward()
    return calls, values(alone)


MARKS: dict[str, Callable[[nn.Module, list[str]], None]] = {
    "found": found,
    "added": added,
    "left": left_from_before,
}


def values(of: nn.Module) -> dict[str, Tensor]:
    gradients = {f"{n}.grad": p.grad for n, p in of.named_parameters() if p.grad is not None}
    return {n: t.detach().clone() for n, t in (*of.named_parameters(), *gradients.items())}


def piped(mesh: penstock.Mesh, of: nn.Module, **options: Any) -> penstock.Pipeline:
    given = {"num_microbatches": 2, "loss": nn.functional.mse_loss, "example_inputs": X[:4]}
    return penstock.Pipeline(of, mesh=mesh, **{**given, **options})


def batch(mesh: penstock.Mesh) -> tuple[Tensor, Tensor]:
    return X.chunk(mesh.num_replicas)[mesh.replica], Y.chunk(mesh.num_replicas)[mesh.replica]


def trained(mesh: penstock.Mesh, marks: list[str], sharding: str | None) -> Any:
    own, calls = model(), list[str]()
    before = [mark for mark in marks if mark == "left"]
    for mark in before:
        MARKS[mark](own, calls)
    pipe = piped(mesh, own, sharding=sharding)
    for mark in marks:
        if mark not in before:
            MARKS[mark](own, calls)
    for _ in range(2):
        pipe.train_step(*batch(mesh))
    gradients = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
    whole = {f"{n}.grad": t for n, t in parts_of(pipe).shards.whole(gradients).items()}
    return calls, {**parts_of(pipe).shards.whole(dict(pipe.named_parameters())), **whole}


WAYS: dict[str, list[Any]] = {
    "replicas": [(["found", "added", "left"], None), (["found", "left"], "zero1")],
    "shards": [(["found", "added", "left"], "data"), (["found", "left"], "zero1")],
}


def several(mesh: penstock.Mesh, name: str) -> Any:
    results = [trained(mesh, *way) for way in WAYS[name]]
    # All refuse alike: a process that hears of another's refusal first would raise PeerError.
    with patch.object(Watch, "report"):
        return results, refused(mesh, name)


REFUSED: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "replicas": [("added", {"sharding": "zero1"})],
    "shards": [
        ("added", {"sharding": "zero1"}),
        ("found", {"sharding": "zero2"}),
        ("found", {"sharding": "zero3"}),
        ("added", {"sharding": "zero3"}),
        ("found", {"sharding": "data", "schedule": pipedream_2bw}),
    ],
}
SPARSE = {"replicas": (None, "zero1"), "shards": ("data", "zero1", "zero2", "zero3")}


def refused(mesh: penstock.Mesh, layout: str) -> list[str]:
    """Tell how hooks are refused, and then embeddings with sparse gradients."""
    said = []
    for mark, options in REFUSED[layout]:
        own = model()
        pipe = piped(mesh, own, **options)
        MARKS[mark](own, [])
        with pytest.raises(ConfigError) as caught:
            if "schedule" in options:
                pipe.train_steps([batch(mesh)], torch.optim.SGD(pipe.parameters(), lr=0.1))
            else:
                pipe.train_step(*batch(mesh))
        said.append(str(caught.value))
    for sharding in SPARSE[layout]:
        own = nn.Sequential(nn.Embedding(10, 8, sparse=True), nn.Linear(8, 4))
        words = torch.zeros(4, 3, dtype=torch.long)
        with pytest.raises(ConfigError) as caught:
            piped(mesh, own, sharding=sharding, example_inputs=words)
        said.append(str(caught.value))
    return said


@pytest.fixture(
    scope="module", params=["replicas", pytest.param("shards", marks=pytest.mark.slow)]
)
def layout_and_results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, list[Any]]:
    layout, folder = request.param, tmp_path_factory.mktemp("hooks")
    return layout, call(several, LAYOUTS[layout], folder, name=layout)


def test_a_hook_sees_once_what_is_summed(layout_and_results: tuple[str, list[Any]]) -> None:
    layout, by_rank = layout_and_results
    for results, _ in by_rank:
        for (marks, sharding), (calls, ours) in zip(WAYS[layout], results, strict=True):
            expected, theirs = unsplit(marks)
            assert sorted(calls) == sorted(expected), sharding
            assert ours.keys() == theirs.keys()
            for name, value in theirs.items():
                torch.testing.assert_close(ours[name], value, rtol=1e-12, atol=1e-12, msg=name)


def test_what_cannot_be_summed_or_seen_whole_is_refused(layout_and_results: Any) -> None:
    layout, by_rank = layout_and_results
    for _, said in by_rank:
        hooks, sparse = said[: len(REFUSED[layout])], said[len(REFUSED[layout]) :]
        for (_, options), text in zip(REFUSED[layout], hooks, strict=True):
            how = "pipedream_2bw" if "schedule" in options else f"sharding={options['sharding']}"
            assert "parameter '0.weight' cannot be run as in the unsplit model with" in text
            assert how in text and "Remove the hook" in text
        for text in sparse:
            assert "layer '0' (Embedding) has a parameter of shape (10, 8)" in text
            assert "make the embedding with sparse=False" in text


class _Adds(torch.autograd.Function):
    """Adds to the gradient of a weight by itself, when the backward comes here."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of: list[Tensor]) -> Tensor:
        ctx.weight = of[0]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if ctx.weight.grad is not None:
            ctx.weight.grad.add_(0.25)
        return gradient, None


class AddsLate(nn.Module):
    """Changes gradients that were complete: of its last layer, and of one that it runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice, self.last = (nn.Linear(6, 6).double() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = _Adds.apply(self.first(x), [self.last.weight])
        for _ in range(2):
            x = checkpoint(self.twice, x, use_reentrant=True)
        return self.last(x)


MODELS: dict[str, Callable[[], nn.Module]] = {"adds late": AddsLate, "plain": model}


def sums_in_backward(
    mesh: penstock.Mesh | None, name: str, sharding: Any = None
) -> tuple[dict[str, Tensor], list[int]]:
    """Train in buckets of one weight; count those whose sums began within each backward."""
    begun, leave = list[int](), replicas._InBackward.leave

    def counted(self: replicas._InBackward) -> None:
        begun.append(self._num_begun)
        leave(self)

    torch.manual_seed(0)
    own = MODELS[name]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(at_rest, "BUCKET_BYTES", 1)
        patch.setattr(replicas._InBackward, "leave", counted)
        in_replicas = mesh is not None and mesh.num_replicas > 1
        pipe = penstock.Pipeline(
            [own],
            1,
            mesh=mesh,
            num_microbatches=2 if in_replicas else 4,
            loss=nn.functional.mse_loss,
            sharding=None if mesh is None else sharding,
            example_inputs=X[:2],
        )
        pipe.train_step(*(batch(mesh) if mesh is not None and in_replicas else (X, Y)))
    found = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
    return {**found, **parts_of(pipe).shards.whole(found)}, begun


def test_gradients_that_change_after_their_sum_began_are_summed_again(tmp_path: Any) -> None:
    expected, _ = sums_in_backward(None, "adds late")
    for found, begun in call(sums_in_backward, (1, 2), tmp_path, name="adds late"):
        assert begun[0] == 6, "all sums begin within the backward, so some gradients change later"
        torch.testing.assert_close(found, expected)


def test_shards_begin_their_sums_within_the_last_backward(tmp_path: Any) -> None:
    """Along the axis of samples, of which each device has a part."""
    expected, _ = sums_in_backward(None, "plain")
    placement = Placement.of(range(1), num_shards=(2, 2))
    for found, begun in call(sums_in_backward, placement, tmp_path, name="plain", sharding="grid"):
        assert begun[0] == 4, "those of all weights"
        torch.testing.assert_close(found, expected)
