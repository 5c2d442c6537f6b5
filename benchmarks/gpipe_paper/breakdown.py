"""Section 3.1 of the paper: where the time of a step with two partitions goes."""

from collections.abc import Sequence

from penstock import Cluster

from .cells import Cell, Compared
from .paper_step import Step
from .published import BREAKDOWN
from .throughput import Guess, amoebanet_guesses_2, transformer_guesses

TABLE = "breakdown"
SET_UP, RATIO = "set-up", "recompute / computation"
_TARGETS = {"computation": 0.08, RATIO: 0.06}
_K = 2
_M = 16
"""The text says that the bubble was measured below theory, 1 / (M + 1): 4.1 % is up to M = 23."""


def shares(step: Step) -> dict[str, float]:
    """Return the shares of all devices' time in a step.

    Load imbalance is what a device works less than the busiest one, bubble all else in which it
    does not compute, messages too.
    """
    found, adding_s = step.timeline.breakdown(), step.accumulation_s
    whole_s = found.num_ranks * step.step_s
    recompute_s = sum(stage.recompute_s for stage in found.stages)
    update_s = sum(adding_s) + found.num_ranks * step.update_s
    busy_s = [float(stage.busy_s) for stage in found.stages]
    imbalance_s = sum(max(busy_s) - each for each in busy_s)
    parts_s = {
        "computation": sum(busy_s) - recompute_s - sum(adding_s),
        "recompute": recompute_s,
        "bubble": found.num_ranks * float(found.step_s) - sum(busy_s) - imbalance_s,
        "load imbalance": imbalance_s,
        "accumulation, update": update_s,
    }
    of_step = {name: float(part_s) / whole_s for name, part_s in parts_s.items()}
    return {**of_step, RATIO: of_step["recompute"] / of_step["computation"]}


def breakdown(*, has_amoebanet: bool = True) -> list[Cell]:
    """Compare the slices: Transformer-48 with 16 micro-batches; other numbers and AmoebaNet-D are
    what it may have been as well.
    """
    first = transformer_guesses(48, Cluster.load("tpu-v3-8"))[0]
    guesses: list[tuple[Guess, Sequence[int]]] = [(first, (_M, 4, 8, 32))]
    if has_amoebanet:
        tpu = Cluster.load("tpu-v2-8"), Cluster.load("tpu-v3-8")
        guesses.append((amoebanet_guesses_2(*tpu)[0], (4, 16, 32)))
    found = [shares(guess.step((_K, m))) for guess, every_m in guesses for m in every_m]
    published = {**BREAKDOWN, RATIO: BREAKDOWN["recompute"] / BREAKDOWN["computation"]}
    return [
        Cell(
            table=TABLE,
            model=first.subject.name,
            what=name,
            published=number,
            predicted=found[0].get(name),
            others=[each[name] for each in found[1:]] if name in found[0] else (),
            target=_TARGETS.get(name),
            by=Compared.BY_DIFFERENCE,
            form=".3f",
        )
        for name, number in published.items()
    ]
