"""The model cut into stages: which layers each runs, and which values cross which edge.

A value that several stages use travels as a relay: from its producer to the first stage that uses
it, from there to the next one that does, and so on; it never visits a stage that has no use for
it. Its gradient runs the relay backwards.  Each holder so starts its own sum with what came from
behind, which is the order in which an unsplit backward pass adds the same terms.

    value given on stage 0, used on 1 and 3:   0 ──► 1 ──► 3      activation
                                               0 ◄── 1 ◄── 3      gradient
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from penstock.schedules.transfers import Transfer

from .stage_plan import MODEL_INPUT, StagePlan, Step, Value, run_steps


def stage_of_layers(partition: tuple[int, ...]) -> tuple[int, ...]:
    """Return the stage of each layer for a partition into `partition[s]` layers per stage."""
    return tuple(stage for stage, count in enumerate(partition) for _ in range(count))


def plan_stages(steps: Sequence[Step], partition: tuple[int, ...]) -> tuple[StagePlan, ...]:
    """Cut layers that run one after the other into stages; route what lives across a cut."""
    stage_of = stage_of_layers(partition)
    relays = _relays(steps, stage_of)
    return tuple(_plan_stage(stage, steps, stage_of, relays) for stage in range(len(partition)))


def _relays(steps: Sequence[Step], stage_of: tuple[int, ...]) -> dict[Value, list[int]]:
    """Return, for each value, the stages that hold it, from its producer to its last user."""
    holders: dict[Value, set[int]] = {}
    for step in steps:
        for value in (*step.inputs, *step.outputs):
            holders.setdefault(value, set()).add(stage_of[step.index])
    return {value: sorted(stages) for value, stages in holders.items()}


def _plan_stage(
    stage: int, layers: Sequence[Step], stage_of: tuple[int, ...], relays: dict[Value, list[int]]
) -> StagePlan:
    steps = tuple(step for step in layers if stage_of[step.index] == stage)
    imports: dict[int, list[Value]] = {}
    exports: dict[int, list[Value]] = {}
    for value, holders in sorted(relays.items()):
        for source, target in pairwise(holders):
            if target == stage:
                imports.setdefault(source, []).append(value)
            if source == stage:
                exports.setdefault(target, []).append(value)
    output = layers[-1].outputs if stage == max(stage_of) else ()
    leaving = {v for values in exports.values() for v in values} | set(output)
    named = {f"{s.path}.{n}": p for s in steps for n, p in s.module.named_parameters()}
    return StagePlan(
        index=stage,
        steps=steps,
        reads_input=relays.get(MODEL_INPUT, [None])[0] == stage,
        imports={peer: tuple(values) for peer, values in sorted(imports.items())},
        exports={peer: tuple(values) for peer, values in sorted(exports.items(), reverse=True)},
        transfers=tuple(
            Transfer(producer=stage, consumer=peer, values=tuple(map(_name_of, values)))
            for peer, values in exports.items()
        ),
        output=output,
        parameters=tuple(named),
        num_parameters=sum({id(p): p.numel() for p in named.values()}.values()),
        run=partial(run_steps, steps, _dead_after(steps, leaving)),
    )


def _name_of(value: Value) -> str:
    layer, place = value
    name = "input" if value == MODEL_INPUT else f"layer {layer}"
    return f"{name}, output {place}" if place else name


def _dead_after(steps: tuple[Step, ...], leaving: set[Value]) -> tuple[tuple[Value, ...], ...]:
    last_use: dict[Value, int] = {}
    for n, step in enumerate(steps):
        last_use.update(dict.fromkeys((*step.inputs, *step.outputs), n))
    dead: list[list[Value]] = [[] for _ in steps]
    for value, n in last_use.items():
        if value not in leaving:
            dead[n].append(value)
    return tuple(map(tuple, dead))
