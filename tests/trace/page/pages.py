"""Pages for tests: small ones, and one with everything, named to break out of where it stands."""

from dataclasses import replace
from functools import cache

from penstock.schedules import gpipe, one_f_one_b
from penstock.simulator import Costs, simulate
from penstock.trace.page import Fact, Page, Section, Step, Table, Text, with_step
from penstock.trace.page.charts import curves
from penstock.trace.timeline import MemoryKind, MemorySample, Timeline

WICKED = "</script><b onclick='x'>\"&"
"""A name that would end a script, begin an element, and end an attribute."""
COSTS = Costs(forward_s=0.01, backward_s=0.02, recompute_s=0.01, transfer_s=0.001)
SLOWER = replace(COSTS, forward_s=(0.01, 0.013, 0.01))


def timeline(num_stages: int = 3, num_microbatches: int = 6, costs: Costs = COSTS) -> Timeline:
    """Predict a step whose memory is known by kind."""
    found = simulate(one_f_one_b(num_stages, num_microbatches), costs)
    memory = [
        MemorySample(stage, time_s, num_bytes, kind)
        for stage in range(num_stages)
        for time_s, num_bytes, kind in (
            (0.0, 4 << 20, MemoryKind.WEIGHTS),
            (0.02, 3 << 20, MemoryKind.ACTIVATIONS),
            (0.08, 0, MemoryKind.ACTIVATIONS),
        )
    ]
    return replace(found, memory=tuple(memory))


def full_page() -> Page:
    measured = replace(timeline(costs=SLOWER), memory=(MemorySample(0, 0.01, 5 << 20),))
    lines = [{"kind": "step", "step": n, "loss": 1 / n, "samples_per_s": 9.5} for n in range(1, 9)]
    lines.append({"kind": "epoch", "step": 8, "train_loss": 0.4, WICKED: 0.5})
    step = Step(
        predicted=timeline(),
        measured=measured,
        optimizer_s=0.003,
        set_up_s=0.002,
        memory_limits_bytes=(8 << 20,) * 3,
        kept_limits_bytes=(6 << 20,) * 3,
    )
    page = Page(
        title=f"run {WICKED}",
        subtitle=WICKED,
        facts=(Fact("accuracy", "98 %", WICKED), Fact(WICKED, WICKED)),
        sections=(
            Section("Curves", tuple(curves(lines)), is_grid=True),
            Section(f"Plan {WICKED}", (Text(WICKED), Table(("layer", WICKED), ((WICKED, "12"),)))),
            Section("Recipe", (Text(f"name = {WICKED}\n" * 20, "code"),)),
        ),
        notes=(WICKED,),
    )
    return with_step(page, step)


@cache
def large_step() -> Timeline:
    """Return a step of a thousand ranks and more than a hundred thousand spans."""
    return simulate(gpipe(1_000, 17), COSTS)
