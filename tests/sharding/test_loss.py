"""A loss takes the output of divided layers in slices, and is the unsplit model's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from penstock import Mesh, Pipeline, Recompute, Transport
from penstock.model.pytree import flatten
from penstock.planner.placement import Placement
from penstock.runtime.pipeline_module import parts_of
from penstock.sharding.layouts import I, Layout, S
from penstock.sharding.routed import for_loss
from penstock_recipes.zoo import gpt
from tests.distributed.call import call

NUM_WORDS, LENGTH = 33, 8
WORDS = torch.randint(0, NUM_WORDS, (7, LENGTH), generator=torch.Generator().manual_seed(0))
TARGETS = WORDS.clone()
TARGETS[0], TARGETS[1, 5:], TARGETS[3:, 2] = -100, -100, -100  # uneven, however they are cut
WHOLE = {count * LENGTH * NUM_WORDS for count in (4, 3)}
"""Elements of the logits of each micro-batch."""
KEPT: dict[str, Tensor] = {}
ZERO = torch.zeros((), dtype=torch.float64)


def ignored(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def smoothed(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.transpose(1, 2), targets, label_smoothing=0.2)


def shifted(logits: Tensor, targets: Tensor) -> Tensor:
    later = targets[:, 1:].flatten().clamp(min=3)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), later, ignore_index=3, reduction="sum")


def kept(logits: Tensor, targets: Tensor) -> Tensor:
    """Keep a sum aside, as for a line of metrics."""
    entropy = ignored(logits, targets)
    KEPT["entropy"] = KEPT.get("entropy", ZERO) + entropy.detach()
    return entropy * 2


def turns(logits: Tensor, targets: Tensor) -> Tensor:
    """Take another path for the second micro-batch, after it has counted."""
    entropy = ignored(logits, targets)
    KEPT["count"] = KEPT.get("count", ZERO) + 1
    return entropy if len(logits) > 3 else entropy + logits.square().mean()


def flips(logits: Tensor, targets: Tensor) -> Tensor:
    """Make the same calls for the second micro-batch, on other dimensions."""
    return logits.logsumexp(2 if len(logits) > 3 else 1).mean()


def draws(logits: Tensor, targets: Tensor) -> Tensor:
    return turns(F.dropout(logits, 0.1), targets)


def reads(logits: Tensor, targets: Tensor) -> Tensor:
    return ignored(logits, targets) * (1 + logits.abs().max().item())


def hooked(logits: Tensor, targets: Tensor) -> Tensor:
    logits.register_hook(lambda gradient: gradient / gradient.norm())
    return ignored(logits, targets)


def penalized(logits: Tensor, targets: Tensor) -> Tensor:
    entropy = ignored(logits, targets)
    (gradient,) = torch.autograd.grad(entropy, logits, create_graph=True)
    return entropy + gradient.square().sum()


class Heated(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.heat = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return ignored(logits * self.heat, targets)


IN_SLICES = (ignored, smoothed, shifted, kept, Heated)
GATHERED = (turns, flips, draws, reads, hooked, penalized)
ALONE: dict[str, Any] = {"num_stages": 1, "transport": Transport.LOOPBACK}
HEAD = {"plan": "auto", "head.weight": "S(0)"}
"""Cuts the vocabulary of the logits, unevenly."""


def piped(loss: Any, **options: Any) -> Pipeline:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"width": 12, "num_heads": 2, "num_words": NUM_WORDS, "dropout": 0.1}
    model = gpt(num_layers=1, **sizes, max_length=LENGTH, tied=False).double()
    loss = loss() if isinstance(loss, type) else loss
    how: dict[str, Any] = {"num_microbatches": 2, "example_inputs": WORDS[:4], "seed": 3}
    return Pipeline(model, loss=loss, **how, **options)


_WITH_MEMORY = (Tensor, nn.Parameter)
"""Others are fake tensors."""


class Sizes(TorchDispatchMode):
    """Notes the elements of each tensor with memory that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        every = (x for x in flatten(result)[0] if type(x) in _WITH_MEMORY and not x.is_meta)
        self.seen |= {x.untyped_storage().nbytes() // x.element_size() for x in every}
        return result


def stepped(pipe: Pipeline) -> dict[str, Any]:
    """Train a step; return the loss, gradients, outputs, and if whole logits were seen."""
    with Sizes() as sizes:
        found = {"loss": pipe.train_step(WORDS, TARGETS)}
    gradients = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
    found |= parts_of(pipe).shards.whole(gradients) if pipe.sharding else gradients
    found |= {name: value.clone() for name, value in KEPT.items()}
    KEPT.clear()
    return {"values": found | {"output": pipe.eval_step(WORDS)}, "sizes": sizes.seen & WHOLE}


def cases(mesh: Mesh) -> Iterator[tuple[Any, dict[str, Any]]]:
    plans: tuple[Any, ...] = (HEAD, "sequence", "data")
    if len(mesh.shard_axes) > 1:
        plans = HEAD | {"plan": "grid", "head.weight": "R·S(0)"}, "grid+sequence"
    for loss in (*IN_SLICES, *GATHERED):
        for number, sharding in enumerate(plans):
            recompute = Recompute.STAGE if loss is smoothed else Recompute.NEVER
            if number == 0 or loss in IN_SLICES[:3]:
                yield loss, {"sharding": sharding, "recompute": recompute}


def in_shards(mesh: Mesh) -> list[dict[str, Any]]:
    return [
        stepped(piped(loss, mesh=mesh, **how)) | {"loss": loss.__name__, "how": str(how)}
        for loss, how in cases(mesh)
    ]


def no_word(mesh: Mesh) -> str:
    pipe = piped(ignored, mesh=mesh, sharding=HEAD)
    try:
        pipe.train_step(WORDS, TARGETS.clamp(min=0) + 1)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "placement",
    [
        Placement.of(range(1), num_shards=2),
        pytest.param(Placement.of(range(2), num_shards=2), marks=pytest.mark.slow),
        pytest.param(Placement.of(range(1), num_shards=(2, 2)), marks=pytest.mark.slow),
    ],
    ids=["2 shards", "2 stages of 2 shards", "2 x 2 shards"],
)
def test_a_loss_of_slices_is_the_unsplit_one_and_nobody_holds_whole_logits(
    placement: Placement, tmp_path: Path
) -> None:
    alone = {loss.__name__: stepped(piped(loss, **ALONE)) for loss in (*IN_SLICES, *GATHERED)}
    of_ranks = call(in_shards, placement, tmp_path, timeout_s=300.0)
    for rank, of_rank in enumerate(of_ranks):
        is_last = rank >= len(of_ranks) - placement.most_shards
        for found in of_rank:
            check(found, alone[found["loss"]], is_last=is_last)


def check(found: dict[str, Any], wanted: dict[str, Any], *, is_last: bool) -> None:
    """Check a step in shards; `is_last`: the process runs the last stage."""
    case = found["loss"], found["how"]
    is_gathered = any(loss.__name__ == found["loss"] for loss in GATHERED)
    assert wanted["sizes"] == WHOLE and bool(found["sizes"]) == (is_gathered and is_last), case
    assert {"loss", "output"} <= found["values"].keys() <= wanted["values"].keys()
    for name, value in found["values"].items():
        if value is not None:  # the last stage has the output
            own = wanted["values"][name]
            assert torch.allclose(value, own, rtol=0, atol=1e-12), (*case, name)


@pytest.mark.slow
def test_a_target_that_is_no_word_is_refused_by_all(tmp_path: Path) -> None:
    assert int(TARGETS.max()) + 1 == NUM_WORDS
    for said in call(no_word, Placement.of(range(1), num_shards=2), tmp_path):
        assert "is out of bounds" in said


def test_layouts_for_a_loss_leave_each_device_a_part_and_others_whole() -> None:
    allowed: list[Layout] = [(I, I), (S(0), I)]
    found = for_loss([(4, 8, 6)], allowed, (2, 2))
    assert found == [(I, I), (S(0), I), (I, S(2)), (S(0), S(2)), (S(2), S(2))]
    assert for_loss([(4, 8, 3)], allowed, (2, 2)) == found[:-1]  # no slices for 4 of 3 words
    assert for_loss([(4, 8, 6), ()], allowed, (2, 2)) == []
