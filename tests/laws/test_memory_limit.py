"""A pipeline with a limit keeps no more than it may, and computes the same bits."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.errors import ConfigError
from penstock.schedules import gpipe, pipedream, v_half, zb_h1, zb_h2, zb_v
from penstock.schedules.family import Family
from penstock.trace import MemoryKind
from penstock.types import Recompute, Trace, Transport
from tests.side_by_side import same_bits


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(32, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 32))
    attending = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True)
    return [copy.deepcopy(kind) for _ in range(4) for kind in (wide, attending)]


def trained(**options: Any) -> tuple[penstock.Pipeline, list[Tensor | None]]:
    """Train two steps; return the pipeline and its gradients."""
    told: dict[str, Any] = {"partition": [4, 4], "num_microbatches": 8}
    told |= {"loss": nn.functional.mse_loss, "schedule": gpipe, "transport": Transport.LOOPBACK}
    told |= {"trace": Trace.MEMORY, "threads_per_stage": 1}
    pipe = penstock.Pipeline(layers(), **options, **told)
    x = torch.linspace(0, 1, 16 * 5 * 32).view(16, 5, 32)
    for _ in range(2):
        pipe.train_step(x, x)
    return pipe, [p.grad for p in pipe.parameters()]


def peaks(pipe: penstock.Pipeline) -> list[int]:
    """Return the most that each stage has kept in the last step."""
    assert pipe.last_timeline is not None
    return list(pipe.last_timeline.peak_bytes().values())


def test_less_is_kept_under_a_lower_limit_as_predicted_and_with_the_same_bits() -> None:
    plain, expected = trained(recompute=Recompute.NEVER)
    of_targets = 16 * 5 * 32 * 4
    everything, floor = peaks(plain)[0], peaks(trained(recompute=Recompute.STAGE)[0])[0]
    for limit in (everything, (everything + floor) // 2, floor + of_targets):
        pipe, found = trained(memory_limit_bytes=limit)
        assert all(map(same_bits, found, expected))
        predicted = pipe.plan.predicted_peak_bytes
        assert predicted is not None and peaks(pipe)[0] == predicted[0] <= limit
        assert peaks(pipe)[1] <= predicted[1] + of_targets
        assert (pipe.plan.recompute[0] is Recompute.NEVER) == (limit == everything)
        assert f"at most {limit:,}" in str(pipe.plan)


def test_by_default_no_more_is_recomputed_than_free_memory_needs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = 4 * max(sum(p.nbytes for m in half for p in m.parameters()) for half in halves())
    everything = peaks(trained(recompute=Recompute.NEVER)[0])[0]
    of_two: dict[str, Any] = {"num_stages": 2, "num_microbatches": 8, "schedule": gpipe}
    x = torch.linspace(0, 1, 16 * 5 * 32).view(16, 5, 32)

    def chosen(free: int | None) -> tuple[Any, ...]:
        # two ranks share one device, of whose free bytes 0.8 are used
        told = None if free is None else round(2 * free / 0.8)
        monkeypatch.setattr("penstock.runtime.planning.free_bytes", lambda device: told)
        with penstock.Pipeline(layers(), loss=nn.functional.mse_loss, **of_two) as pipe:
            pipe.train_step(x, x)
            return pipe.plan.recompute

    whole = (Recompute.STAGE, Recompute.STAGE)
    assert chosen(None) == whole
    assert chosen(weights + 2 * everything) == (Recompute.NEVER, Recompute.NEVER)
    some = chosen(weights + everything // 2)
    assert set(some) - {Recompute.NEVER} and some != whole
    assert chosen(weights // 2) == whole  # nothing fits: as without GPUs


def halves() -> list[list[nn.Module]]:
    return [layers()[:5], layers()[3:]]


def trained_without_flush(
    partition: tuple[int, ...] = (4, 4), **options: Any
) -> tuple[penstock.Pipeline, list[Tensor]]:
    """Train five mini-batches without a flush; return the pipeline, losses and weights."""
    told: dict[str, Any] = {"partition": partition, "num_microbatches": 2}
    told |= {"loss": nn.functional.mse_loss, "schedule": pipedream()}
    told |= {"transport": Transport.LOOPBACK, "trace": Trace.MEMORY, "threads_per_stage": 1}
    pipe = penstock.Pipeline(layers(), **options, **told)
    x = torch.linspace(0, 1, 4 * 5 * 32).view(4, 5, 32)
    losses = pipe.train_steps([(x, x)] * 5, torch.optim.AdamW(pipe.parameters(), lr=0.01))
    return pipe, [losses, *(p.detach() for p in pipe.parameters())]


@cache
def keeping_everything() -> tuple[int, list[Tensor]]:
    """Return the most bytes that the first of four stages keeps, and losses and weights."""
    pipe, found = trained_without_flush((2, 2, 2, 2), recompute=Recompute.NEVER)
    return peaks(pipe)[0], found


def test_versions_of_weights_are_in_what_is_predicted_and_kept() -> None:
    pipe, expected = trained_without_flush(recompute=Recompute.NEVER)
    everything = peaks(pipe)[0]
    of_weights = sum(p.numel() * 4 for p in pipe.parameters()) // 2  # of two equal stages
    for limit in (everything, everything - 1, of_weights + 120_000):
        pipe, found = trained_without_flush(memory_limit_bytes=limit, offload=True)
        assert all(map(same_bits, found, expected))
        predicted = pipe.plan.predicted_peak_bytes
        assert predicted is not None and peaks(pipe)[0] <= predicted[0] <= limit
        assert (pipe.plan.recompute[0] is Recompute.NEVER) == (limit == everything)
    missing = "1 bytes too few for weights alone; .* keeps 2 versions of .* bytes on stage 0"
    with pytest.raises(ConfigError, match=missing):
        trained_without_flush(memory_limit_bytes=of_weights - 1)


@pytest.mark.parametrize(
    "saving",
    [
        {"recompute": Recompute.NEVER, "offload": True},
        {"recompute": Recompute.STAGE, "offload": [True, False, True, False]},
        {"recompute": Recompute.layers(0, 1, 6)},
        {"recompute": [Recompute.layers(1), *[Recompute.NEVER] * 3], "offload": True},
    ],
)
def test_less_is_kept_without_a_flush_and_with_the_same_bits(saving: dict[str, Any]) -> None:
    kept, expected = keeping_everything()
    pipe, found = trained_without_flush((2, 2, 2, 2), **saving)
    assert all(map(same_bits, found, expected)) and peaks(pipe)[0] < kept


def of_ranks(schedule: Family, **options: Any) -> tuple[list[int], tuple[int, ...] | None]:
    """Return the most that each rank of an MLP has kept, and what was predicted."""
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 32))
    told: dict[str, Any] = {"partition": [2, 2] if schedule.stages_per_rank == 1 else [1, 1, 1, 1]}
    told |= {"num_microbatches": 8, "loss": lambda output, _: output.square().mean()}
    told |= {"schedule": schedule, "transport": Transport.LOOPBACK, "trace": Trace.MEMORY}
    told |= {"threads_per_stage": 1}
    pipe = penstock.Pipeline([copy.deepcopy(wide) for _ in range(4)], **options, **told)
    x = torch.randn(64, 32)
    pipe.train_step(x, x[:, :1])
    assert pipe.last_timeline is not None
    most, now = [0, 0], [0] * pipe.plan.num_stages
    kept = (m for m in pipe.last_timeline.memory if m.kind is MemoryKind.ACTIVATIONS)
    for sample in kept:
        rank = pipe.plan.placement.places[sample.stage]
        now[sample.stage] = sample.kept_bytes
        own = [now[s] for s, place in enumerate(pipe.plan.placement.places) if place == rank]
        most[rank] = max(most[rank], sum(own))
    return most, pipe.plan.predicted_peak_bytes


@pytest.mark.parametrize("schedule", [zb_h1(), zb_h2(), zb_v(), v_half()], ids=str)
def test_what_half_a_backward_leaves_is_under_the_limit(schedule: Family) -> None:
    most, _ = of_ranks(schedule)
    limit = max(most) * 5 // 4
    kept, predicted = of_ranks(schedule, memory_limit_bytes=limit)
    assert predicted is not None and max(kept) <= limit and max(predicted) <= limit
    of_copies = 8 * 32 * 4 + 64  # of the batch, and to the place in a cache line
    assert all(a <= b + of_copies for a, b in zip(kept, predicted, strict=True))
    with pytest.raises(ConfigError, match="bytes too few"):
        of_ranks(schedule, memory_limit_bytes=[36864, 8192])


def test_a_limit_beside_a_policy_and_one_that_nothing_fits_are_refused() -> None:
    with pytest.raises(ConfigError, match="decides what is recomputed, and recompute= is given"):
        trained(memory_limit_bytes=10**9, recompute=Recompute.STAGE)
    with pytest.raises(ConfigError, match=r"on rank 0 .stage 0.: .* bytes too few"):
        trained(memory_limit_bytes=1000)
    with pytest.raises(ConfigError, match="it must be a whole number"):
        trained(memory_limit_bytes=1.5)
