"""Law of synchronous families: micro-batches pass a stage in their order, both ways.

It makes gradients equal to the unsplit model's to the bit: sums are made in the same order.
"""

from penstock.schedules import ir

from .lanes import Lanes


def in_order(lanes: Lanes) -> None:
    """Check that the forwards and the backwards of each stage come in micro-batch order."""
    for stage in range(lanes.num_stages):
        _check(lanes, stage, "the forwards of a stage must come in micro-batch order", ir.Forward)
        for kinds in (ir.GIVES_GRADIENTS, ir.ADDS_GRADIENTS):
            _check(
                lanes,
                stage,
                "the backwards of a stage must come in micro-batch order, or gradients would not "
                "add up in the order of the unsplit model",
                *kinds,
            )


def _check(lanes: Lanes, stage: int, problem: str, *kinds: type[ir.Compute]) -> None:
    found = lanes.microbatches(stage, *kinds)
    if found != list(range(len(found))):
        number = next(number for number, i in enumerate(found) if i != number)
        raise lanes.fault(stage, lanes.positions(stage, *kinds)[number], problem)
