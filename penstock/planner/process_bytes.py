"""Foretell the most that each process of a step has in its host's memory at once.

    process          torch, Penstock, their operators: `Host.process_bytes`, as calibrated
    batch            what its stages read of it, all of it, all the time
    by time          weights, gradients, what the optimizer keeps, activations, values on their
                     way, versions of weights: the most that its ranks hold together

What an allocator keeps of freed memory comes on top.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.schedules.memory import Kept
from penstock.simulator.memory import memory_of
from penstock.trace.timeline import most_bytes

if TYPE_CHECKING:
    from .predict import Foretold


def process_bytes(told: "Foretold", *, with_optimizer: bool) -> tuple[int, ...] | None:
    """Return the bytes of each process; see `Foretold.process_bytes`."""
    bases = list(_bases(told))
    known = [base for base in bases if base is not None]
    if len(known) < len(bases):
        return None
    placement = told.plan.placement
    own: Sequence[Sequence[int]] = [range(placement.num_stages)]
    if told.plan.transport.is_between_processes:
        own = [placement.stages_of(rank) for rank in range(placement.num_ranks)]
    weights = told.weights
    if not with_optimizer:
        weights = tuple(replace(of_stage, optimizer_bytes=0) for of_stage in weights)
    kept = [_without_batch(of_stage) for of_stage in told.kept]
    samples = memory_of(told.timeline, kept, weights, told.sharing.num_bytes)
    count = told.plan.num_microbatches
    return tuple(
        base
        + sum(count * told.kept[stage].stays for stage in stages)
        + most_bytes(samples, stages)
        for base, stages in zip(known, own, strict=False)
    )


def _bases(told: "Foretold") -> Iterator[int | None]:
    """Yield what the process of each rank takes with nothing in it; None where weights are in
    another memory than the host's, or nobody has measured.
    """
    for place in told.places:
        is_host = told.cluster.device_of(place).torch_type == "cpu"
        yield told.cluster.host_of(place).process_bytes if is_host else None


def _without_batch(kept: Kept) -> Kept:
    return Kept(kept.graph - kept.stays, kept.inputs - kept.stays, kept.weights)
