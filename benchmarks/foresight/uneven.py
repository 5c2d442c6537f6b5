"""Uneven work, uneven devices: does the automatic plan gain over equal stages what is predicted?

    heavy layer     one block of a transformer is three, so that as many layers in each stage is
                    more work in one of them
    slow device     one of two cores is half as fast: the layers that run there wait as long as
                    they have worked

python -m benchmarks.foresight.uneven
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from statistics import median
from typing import Any

from torch import nn

import penstock
from benchmarks.blocks import transformer
from benchmarks.foresight.main import answer, of_one_model
from benchmarks.foresight.subjects import Subject
from benchmarks.report import Column, interleaved, progress
from penstock import Cluster, Pipeline, Plan, Profile
from penstock.planner.candidates import Constraints
from penstock.planner.predict import Prediction
from penstock.planner.rank import find_plans

NUM_RANKS, NUM_MICROBATCHES = 2, 8
HEAVY_PLACE, HEAVY = 1, 3
SLOW_RANK, SLOWER = 1, 2
COLUMNS = (
    Column("setting", "setting"),
    Column("layers of each", "partition"),
    Column("stages", "name"),
    Column("predicted: ms", "predicted_ms", ".1f"),
    Column("measured: ms", "measured_ms", ".1f"),
    Column("predicted gain", "predicted_gain", ".3f"),
    Column("measured gain", "measured_gain", ".3f"),
    Column("off by", "off_by", "+.1%"),
)


@dataclass(frozen=True, slots=True)
class Setting:
    """A model and what it runs on; `slow`: the layers on the second rank are slowed down."""

    name: str
    subject: Subject
    cluster: Cluster
    heavy: bool
    slow: bool

    def layers(self) -> list[nn.Module]:
        """Build the model."""
        subject = self.subject
        count = subject.depth + (HEAVY - 1 if self.heavy else 0)
        blocks = list(transformer(count, subject.width, 4))
        if not self.heavy:
            return blocks
        one = nn.Sequential(*blocks[HEAVY_PLACE : HEAVY_PLACE + HEAVY])
        return [*blocks[:HEAVY_PLACE], one, *blocks[HEAVY_PLACE + HEAVY :]]

    def profile(self) -> Profile:
        """Measure the layers alone."""
        inputs, targets = self.subject.data()
        return penstock.profile(
            self.layers(),
            inputs,
            loss=self.subject.loss,
            targets=targets,
            microbatch_sizes=[self.subject.batch // NUM_MICROBATCHES],
            threads=1,
            name=self.name,
        )

    def plans(self, profile: Profile) -> dict[str, Plan]:
        """Find the automatic plan; make one with as many layers in each stage."""
        constraints = Constraints(
            batch_size=self.subject.batch,
            num_ranks=NUM_RANKS,
            num_replicas=1,
            num_microbatches=NUM_MICROBATCHES,
            schedules=("one_f_one_b",),
            stages_per_rank=(1,),
        )
        found = find_plans([profile], self.cluster, constraints).best[0].plan
        least, more = divmod(len(found.layers), NUM_RANKS)
        equal = tuple(least + (stage < more) for stage in range(NUM_RANKS))
        return {"equal": replace(found, partition=equal), "automatic": found}

    def stepping(self, plan: Plan) -> tuple[Pipeline, Callable[[], float]]:
        """Make a pipeline, and what runs a step of it and returns its seconds."""
        layers = self.layers()
        if self.slow:
            first = list(accumulate(plan.partition, initial=0))[SLOW_RANK]
            for layer in layers[first:]:
                slow_down(layer)
        pipe = Pipeline(layers, plan=plan, loss=self.subject.loss)
        inputs, targets = self.subject.data()

        def step() -> float:
            pipe.zero_grad()
            start_s = time.perf_counter()
            pipe.train_step(inputs, targets)
            return time.perf_counter() - start_s

        return pipe, step


def slow_down(layer: nn.Module) -> None:
    """Let a layer wait, after each forward and backward, for as long as that has taken."""
    began_s: list[float] = []

    def begin(*_: object) -> None:
        began_s.append(time.perf_counter())

    def wait(*_: object) -> None:
        time.sleep((SLOWER - 1) * (time.perf_counter() - began_s.pop()))

    layer.register_forward_pre_hook(begin)
    layer.register_forward_hook(wait)
    layer.register_full_backward_pre_hook(begin)
    layer.register_full_backward_hook(wait)


def with_slow_core(cluster: Cluster) -> Cluster:
    """Return a host of two cores, the second of which is half as fast."""
    (host,) = cluster.hosts
    name = host.devices[0]
    core = cluster.devices[name]
    slow = replace(
        core,
        name=f"slow {name}",
        flops_per_s={dtype: rate / SLOWER for dtype, rate in core.flops_per_s.items()},
        bytes_per_s=core.bytes_per_s / SLOWER,
        issue_s=core.issue_s * SLOWER,
        gap_s=core.gap_s * SLOWER,
    )
    return replace(
        cluster,
        devices={name: core, "slow": slow},
        hosts=(replace(host, devices=(name, "slow")),),
    )


def measure(setting: Setting, rounds: int) -> list[dict[str, Any]]:
    """Run both plans in turn."""
    progress(setting.name)
    profile = setting.profile()
    plans = setting.plans(profile)
    told_s = {n: Prediction(p, profile, setting.cluster).timeline.step_s for n, p in plans.items()}
    made = [setting.stepping(plan) for plan in plans.values()]
    steps = [step for _, step in made]
    found_s = interleaved(steps, rounds)
    for pipe, _ in made:
        pipe.close()
    rows: list[dict[str, Any]] = []
    for (name, plan), its_s in zip(plans.items(), found_s, strict=True):
        pairs = zip(found_s[0], its_s, strict=True)
        measured = median(before / after for before, after in pairs)
        predicted = told_s["equal"] / told_s[name]
        rows.append(
            {
                "setting": setting.name,
                "partition": "-".join(map(str, plan.partition)),
                "name": name,
                "predicted_ms": told_s[name] * 1e3,
                "measured_ms": median(its_s) * 1e3,
                "predicted_gain": predicted,
                "measured_gain": measured,
                "off_by": measured / predicted - 1,
                "seconds": list(its_s),
            }
        )
    return rows


def settings(subject: Subject, cluster: Cluster) -> Iterator[Setting]:
    """Yield what is measured."""
    yield Setting("a layer three times as heavy", subject, cluster, heavy=True, slow=False)
    slow = with_slow_core(cluster)
    yield Setting("a core half as fast", subject, slow, heavy=False, slow=True)


def both(subject: Subject, cluster: Cluster, rounds: int) -> Iterator[dict[str, Any]]:
    """Measure both settings."""
    for setting in settings(subject, cluster):
        yield from measure(setting, rounds)


def main(arguments: list[str] | None = None) -> None:
    """Measure and print."""
    answer(__doc__ or "", partial(of_one_model, COLUMNS, both), arguments, rounds=9)


if __name__ == "__main__":
    main()
