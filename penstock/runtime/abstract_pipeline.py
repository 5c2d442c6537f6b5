"""What a pipeline is beside its steps: layers, and the engine that runs them by a plan."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, groupby
from typing import Any, Self

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, check_count, check_kind
from penstock.mesh import Mesh
from penstock.model.held import Held
from penstock.model.layers import Layers
from penstock.model.state import in_evaluation
from penstock.planner.arguments import Arguments
from penstock.planner.plan import Plan
from penstock.schedules.ir import Schedule
from penstock.schedules.lower import Mode
from penstock.torch_private import AbstractMovable
from penstock.trace.timeline import Timeline
from penstock.trace.units import count_text
from penstock.types import Trace

from .engine import Engine
from .evaluation import evaluate
from .microbatches import Call, Reduce, check_loss, check_reduction, first_microbatch
from .module_form import run_as_module
from .planning import agree, balance, make_plan
from .record import Record

LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a pipeline is given that decides nothing of how it runs; with `draws`, layers without
    values get drawn ones.

    Raises:
        ConfigError: one of them is of another kind.
    """

    example_inputs: Any
    loss: LossFunction | None
    reduction: Reduce
    trace: Trace | bool
    draws: bool

    def __post_init__(self) -> None:
        check_loss(self.loss)
        check_reduction(self.reduction)
        _as_trace(self.trace)


class AbstractPipeline(AbstractMovable):
    """Base of `Pipeline`: holds the layers and the engine, and says what can be read of them.

    Another plan, of a measured batch or of moved layers, makes another engine.
    """

    number = 0  # among the pipelines of a mesh of processes

    def __init__(
        self,
        layers: Layers,
        arguments: Arguments,
        plan: Plan | None,
        mesh: Mesh | None,
        wanted: Wanted,
    ) -> None:
        balances = plan is None and arguments.are_measured
        plan = make_plan(arguments, plan, layers, mesh)
        part = first_microbatch(wanted.example_inputs, plan.num_microbatches)
        mesh = mesh or Mesh.of_one_process(plan.placement.num_places, plan.timeout_s)
        with mesh.world.reporting(plan.placement.names):
            plan, number, balances = agree(plan, layers, mesh, part, balances=balances)
            loss = wanted.loss or layers.own_loss
            engine = Engine(layers, loss, plan, mesh, draws=wanted.draws)
            super().__init__()
            self._layers, self._engine = layers, engine
            self.__dict__.update(layers.registered(engine.holds))
            self.number = engine.splitter.number = number
        self._wanted, self._will_balance = Call(plan.num_microbatches, wanted.reduction), balances
        self.step, self._evaluations = 0, 0
        self._trace = _as_trace(wanted.trace)
        self._record: Record | None = None
        self._timeline: Timeline | None = None

    @property
    def plan(self) -> Plan:
        """Everything that decides how this pipeline runs."""
        return self._engine.plan

    @property
    def num_stages(self) -> int:
        """K."""
        return self.plan.num_stages

    @property
    def seed(self) -> int:
        """Of the layers' random streams."""
        return self.plan.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._engine.plan = replace(self.plan, seed=seed)

    @property
    def mesh(self) -> Mesh:
        """Who runs what."""
        return self._engine.mesh

    @property
    def original(self) -> nn.Module:
        """The model that was captured; this pipeline itself if it was given layers."""
        return self._layers.model or self

    @property
    def held(self) -> Held:
        """What this process has of the model: tensors, and extra state of the modules it runs."""
        return Held(
            self,
            self.original,
            self._layers.elsewhere(self._engine.holds),
            is_part=self.mesh.is_distributed,
        )

    @property
    def num_microbatches(self) -> int:
        """M; a batch of fewer samples runs as that many micro-batches."""
        return self.plan.num_microbatches

    @property
    def partition(self) -> tuple[int, ...]:
        """Layers per stage."""
        return self.plan.partition

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each stage."""
        return self._engine.devices

    @property
    def threads_per_stage(self) -> int:
        """Intra-op threads of each stage on the CPU."""
        return self.plan.threads_per_stage

    @property
    def trace(self) -> Trace:
        """What each step records in `last_timeline`; True stands for Trace.TIME."""
        return self._trace

    @trace.setter
    def trace(self, trace: Trace | bool) -> None:
        self._trace = _as_trace(trace)

    @property
    def last_timeline(self) -> Timeline | None:
        """What the last training step recorded; None if it was not traced."""
        if self._timeline is None and self._record is not None:
            self._timeline = self._record.timeline()
        return self._timeline

    def schedule_for(self, num_microbatches: int | None = None) -> Schedule:
        """Return the lowered, verified schedule that `train_step` executes."""
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        return self._engine.program(Mode.TRAIN, check_count("num_microbatches", count))

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: int | slice) -> "nn.Module | nn.Sequential":
        """Return a layer, or several as an nn.Sequential, by position; those of other processes
        hold shapes only.
        """
        modules = [step.module for step in self._layers]
        return nn.Sequential(*modules[index]) if isinstance(index, slice) else modules[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return (step.module for step in self._layers)

    def __repr__(self) -> str:
        plan = self.plan
        head = f"Pipeline({count_text(plan.num_stages, 'stage')}, "
        head += f"{count_text(plan.num_microbatches, 'micro-batch')}, "
        until = "until the first batch is measured" if self._will_balance else ""
        cut = ", ".join(filter(None, (f"  partition {list(plan.partition)}", plan.balance, until)))
        return "\n".join([head + plan.choices, cut, *self._lines_of_stages(), ")"])

    def _lines_of_stages(self) -> Iterator[str]:
        """Say in one line a stage where it runs, its layers and parameters."""
        here = {stage.index: str(stage.device.device) for stage in self._engine.stages}
        processes, replica = self._engine.processes, self.mesh.replica
        for stage_plan in self._engine.stage_plans:
            index, steps = stage_plan.index, stage_plan.steps
            where = here.get(index, f"rank {processes.rank_of(index, replica)}")
            names = groupby(type(step.module).__name__ for step in steps)
            counts = ((name, len(list(group))) for name, group in names)
            kinds = [f"{name} x{count}" if count > 1 else name for name, count in counts]
            span = steps[0].name if len(steps) == 1 else f"{steps[0].name} to {steps[-1].name}"
            yield (
                f"  stage {index} on {where}: layers {span} ({', '.join(kinds)}), "
                f"{stage_plan.num_parameters:,} parameters"
            )

    def _outputs_with_gradients(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Run the forwards of a step whose backwards come when the outputs' gradients do."""
        if self.mesh.is_distributed:
            raise ConfigError(
                "pipe(inputs) with gradients needs all stages in this process, and they are in "
                "several; use train_step with loss=, or eval_step for outputs"
            )
        value = self._layers.as_one_value(inputs, keywords)
        call = replace(self._wanted, trace=self._trace)
        batch = self._engine.splitter.cut(value, None, call)
        self._balance_by(batch.inputs[0])
        run = self._engine.new_run(batch, "train", self.step, with_grad=True)
        self.step += 1
        outputs = run_as_module(self._engine, run, value, batch)
        self._record, self._timeline = self._engine.record(run, Mode.FORWARDS), None
        return outputs

    def _called(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Return outputs, for a backward to come where gradients are wanted."""
        with self._engine.one_at_a_time():
            if torch.is_grad_enabled():
                return self._outputs_with_gradients(inputs, keywords)
            return self._outputs(inputs, keywords)

    def _evaluated(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Return outputs in evaluation mode."""
        with self._engine.one_at_a_time():  # before the modes change: a step may be running
            everyone = [*self.modules(), *self.original.modules()]
            with in_evaluation(everyone):
                return self._outputs(inputs, keywords)

    def _outputs(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Run forwards only, and put the outputs of the micro-batches together."""
        with self._engine.reporting():
            value = self._layers.as_one_value(inputs, keywords)
            batch = self._engine.splitter.cut(value, None, self._wanted)
            outputs = evaluate(self._engine, batch, self._evaluations)
            self._evaluations += 1
            return outputs

    def _balance_by_example(self, inputs: Any) -> None:
        self._balance_by(first_microbatch(inputs, self.num_microbatches))

    def _balance_by(self, part: Any) -> None:
        """Cut the layers anew by measured time, with the first micro-batch that is at hand, if
        this was not done yet.
        """
        if self._will_balance and part is not None:
            self._engine.check_unchanged()
            self._will_balance = False
            self._run_as(balance(self.plan, self._layers, part))

    def _run_as(self, plan: Plan) -> None:
        before = self._engine
        self._engine = Engine(self._layers, before.loss, plan, before.mesh, before=before)

    def after_move(self, function: Callable[..., Any]) -> None:
        """Let each stage run where its parameters are now (after `to`, `half`)."""
        plan, names = self.plan, list(self.plan.placement.devices)
        for stage in self._engine.stages:
            modules = [step.module for step in stage.plan.steps]
            tensors = (t for m in modules for t in chain(m.parameters(), m.buffers()))
            nowhere = torch.empty(0, device=stage.device.device)
            names[stage.index] = str(next((t.device for t in tensors), function(nowhere).device))
        self._run_as(replace(plan, placement=replace(plan.placement, devices=tuple(names))))

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all layers, as of any module."""
        for module in self.original.modules():
            module.training = mode
        return super().train(mode)

    def close(self) -> None:
        """End the worker threads, as garbage collection does; the next call starts new ones."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def check_pipeline(pipe: object) -> None:
    """Refuse what is no pipeline.

    Raises:
        ConfigError: it is none.
    """
    check_kind("pipe", pipe, AbstractPipeline, "the pipeline, a penstock.Pipeline")


def _as_trace(trace: Trace | bool) -> Trace:
    """Return what is to be recorded; True stands for Trace.TIME.

    Raises:
        ConfigError: it is no such choice.
    """
    check_kind("trace", trace, (Trace, bool), f"True, or one of {', '.join(map(str, Trace))}")
    return trace if isinstance(trace, Trace) else (Trace.TIME if trace else Trace.OFF)
