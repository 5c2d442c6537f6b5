"""The front door: a model as a pipeline."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.arguments import (
    Devices,
    check_count,
    check_targets,
    num_cores,
    resolve_devices,
    resolve_num_stages,
)
from penstock.costs.measure import measure_layers
from penstock.errors import BatchError, ConfigError, RandomnessError
from penstock.model.layers import Layer, Layers, as_layers
from penstock.planner.partition import balance
from penstock.runtime.caller import CallerContext
from penstock.runtime.engine import Engine
from penstock.runtime.input_gradients import accumulate_into_inputs
from penstock.runtime.microbatches import batch_size, gather, loss_weights, microbatch_sizes, split
from penstock.runtime.module_form import run_as_module
from penstock.runtime.random_streams import rewound_default_generators
from penstock.runtime.record import Record
from penstock.runtime.run import Run
from penstock.schedules.gpipe import gpipe
from penstock.schedules.ir import Schedule
from penstock.schedules.lower import Mode, ScheduleFunction
from penstock.trace.timeline import Timeline
from penstock.types import Recompute, Reduction, Trace, Transport

LossFunction = Callable[[Any, Any], Tensor]


class Pipeline(nn.Module):
    """Trains a layered model as a pipeline of K stages over M micro-batches.

    The gradients are those of the unsplit model run micro-batch after micro-batch, to the bit, for
    every K, schedule, recompute policy and transport (with as many intra-op threads on both
    sides).

    Args:
        layers: an nn.Sequential, or a list of modules and `penstock.Layer`s; used as they are,
            not copied.
        num_stages: K.  Layers are balanced by measured forward and backward time: of
            `example_inputs` now, else of the first batch; until then by parameter counts.
        partition: layers per stage, instead of `num_stages`.
        num_microbatches: M.  A batch of N < M samples runs as N micro-batches; sizes differ by
            at most 1.
        loss: (output, target) -> scalar tensor for one micro-batch; needed by `train_step`.
        reduction: how `loss` reduces over what it is given; or a function target -> weight, such
            as the number of real tokens.  Micro-batch losses are weighted so that they sum to the
            loss of the mini-batch.
        schedule: a function (num_stages, num_microbatches) -> Schedule.
        recompute: which activations to compute twice instead of keeping.
        devices: one per stage, or one for all; default: the visible GPUs in turn, else the CPU.
        seed: of the layers' random streams.
        example_inputs: a batch to balance the layers with.
        threads_per_stage: intra-op threads of each stage on the CPU; default: the cores divided
            among the stages.  Some kernels round differently for another count.
        transport: worker threads, or everything in the calling thread.
        trace: what to record of each step, in `last_timeline`.
        timeout_s: deadline of every wait between stages, in seconds.

    Raises:
        ConfigError: an argument cannot work.
        PartitionError: the layers cannot be cut as asked.
    """

    def __init__(  # noqa: PLR0913 - the front door: each a keyword with a default
        self,
        layers: "nn.Sequential | Sequence[nn.Module | Layer] | Layers",
        num_stages: int | None = None,
        *,
        partition: Sequence[int] | None = None,
        num_microbatches: int = 1,
        loss: LossFunction | None = None,
        reduction: Reduction | Callable[[Any], Any] = Reduction.MEAN,
        schedule: ScheduleFunction = gpipe,
        recompute: Recompute = Recompute.STAGE,
        devices: Devices = None,
        seed: int = 0,
        example_inputs: Any = None,
        threads_per_stage: int | None = None,
        transport: Transport = Transport.THREADS,
        trace: Trace | bool = Trace.OFF,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__()
        self._layers = as_layers(layers)
        for step in self._layers:
            self._modules[step.name] = step.module
        self._num_stages = resolve_num_stages(num_stages, partition, len(self._layers))
        self._num_microbatches = check_count("num_microbatches", num_microbatches)
        threads = threads_per_stage or max(1, num_cores() // self._num_stages)
        self._engine = Engine(
            self._layers,
            schedule,
            recompute,
            transport,
            check_count("threads_per_stage", threads),
            timeout_s,
            loss,
        )
        self._objective = _Objective(loss, reduction)
        self._choices = (
            f"schedule={getattr(schedule, '__name__', schedule)}, recompute={recompute.name}"
        )
        self.seed = seed
        self.step = 0
        self.trace = trace
        self._record: Record | None = None
        self._timeline: Timeline | None = None
        self._evaluations = 0
        self._threads = threads
        self._cut_by = "as given" if partition is not None else ""
        if self._num_stages > 1 and partition is None:
            self._cut_by = _BY_COUNTS
        self._engine.cut(
            tuple(partition or balance(self._layers.parameter_counts(), self._num_stages)),
            resolve_devices(devices, self._num_stages),
        )
        if example_inputs is not None:
            self._measure_once(example_inputs)

    # -- what it is -----------------------------------------------------------------------------

    @property
    def num_stages(self) -> int:
        """K."""
        return self._num_stages

    @property
    def num_microbatches(self) -> int:
        """M; a batch of fewer samples runs as that many micro-batches."""
        return self._num_microbatches

    @property
    def partition(self) -> tuple[int, ...]:
        """Layers per stage."""
        return self._engine.partition

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """The device of each stage."""
        return self._engine.devices

    @property
    def threads_per_stage(self) -> int:
        """Intra-op threads of each stage on the CPU."""
        return self._threads

    @property
    def trace(self) -> Trace:
        """What each step records in `last_timeline`; True stands for Trace.TIME."""
        return self._trace

    @trace.setter
    def trace(self, trace: Trace | bool) -> None:
        self._trace = trace if isinstance(trace, Trace) else (Trace.TIME if trace else Trace.OFF)

    @property
    def last_timeline(self) -> Timeline | None:
        """What the last training step recorded; None if it was not traced."""
        if self._timeline is None and self._record is not None:
            self._timeline = self._record.timeline()
        return self._timeline

    def _note(self, run: Run, mode: Mode) -> None:
        self._record, self._timeline = self._engine.record(run, mode), None

    def schedule_for(self, num_microbatches: int | None = None) -> Schedule:
        """Give the lowered, verified schedule that `train_step` executes."""
        return self._engine.program(Mode.TRAIN, num_microbatches or self._num_microbatches)

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: int | slice) -> "nn.Module | nn.Sequential":
        """Give a layer, or several as an nn.Sequential, by position."""
        modules = [step.module for step in self._layers]
        return nn.Sequential(*modules[index]) if isinstance(index, slice) else modules[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return (step.module for step in self._layers)

    def __repr__(self) -> str:
        head = f"Pipeline({self.num_stages} stages, {self.num_microbatches} micro-batches, "
        head += f"{self._choices}"
        cut = f"  partition {list(self.partition)}" + (f", {self._cut_by}" if self._cut_by else "")
        return "\n".join([head, cut, *self._engine.describe(), ")"])

    # -- a training step ------------------------------------------------------------------------

    def train_step(self, inputs: Any, targets: Any = None) -> Tensor:
        """Run one synchronous step: forwards, losses and backwards of all micro-batches.

        Args:
            inputs: a tensor, or any nest of containers of tensors, of shape (N, ...); goes to the
                first layer as its one argument.  Values that are no tensors go to every
                micro-batch.
            targets: likewise, of the same N; None if the loss needs none.

        Returns:
            The loss of the mini-batch, a detached scalar tensor.  Gradients are added to `.grad`
            of the parameters (and of inputs that require it); activations are freed.

        Raises:
            BatchError: inputs and targets cannot be cut into the same micro-batches.
            ConfigError: there is no loss, it is no scalar, or nothing wants a gradient.
            PenstockError: the pipeline is running already, in another thread or around this call.
            Exception: whatever a layer raised, with stage, layer and micro-batch noted.
                Gradients are then incomplete: zero them.
        """
        if self._objective.loss is None:
            raise ConfigError(
                "train_step needs a loss; give Pipeline(..., loss=...), or use pipe(inputs)"
            )
        if not torch.is_grad_enabled():
            raise ConfigError(
                "train_step was called under torch.no_grad(); use eval_step, or leave that block"
            )
        sizes = self._sizes(inputs, targets)
        target_parts = split(targets, sizes)
        check_targets(targets)
        with self._engine.one_at_a_time():
            self._measure_once(inputs)
            run = self._new_run("train", self.step, split(inputs, sizes), with_grad=True)
            run.targets, run.loss = target_parts, self._objective.loss
            run.weights = loss_weights(self._objective.reduction, target_parts, sizes)
            self.step += 1
            self._engine.drive(run, Mode.TRAIN)
            self._note(run, Mode.TRAIN)
        accumulate_into_inputs(inputs, run, sizes)
        total = run.losses[0]
        for i in range(1, len(sizes)):
            total = total + run.losses[i]
        return total

    # -- outputs --------------------------------------------------------------------------------

    def eval_step(self, inputs: Any) -> Any:
        """Give the model's outputs for a batch of any size, in evaluation mode and without
        gradients.

        Every module is back in the mode it was in afterwards.  May be called at any time, also
        between steps of training.

        Raises:
            BoundaryError: the outputs of the micro-batches cannot be put together along
                dimension 0.
        """
        training = [module for module in self.modules() if module.training]
        for module in training:
            module.training = False
        try:
            return self._outputs(inputs)
        finally:
            for module in training:
                module.training = True

    def forward(self, inputs: Any) -> Any:
        """Give the model's outputs for the whole batch, as the unsplit model does: a drop-in
        module.

        Compute any loss from them and call `backward()`: the stages then run their backward
        passes and add to `.grad`, as in `train_step`.  Without gradients (torch.no_grad())
        nothing is kept.

        Raises:
            BoundaryError: the outputs of the micro-batches cannot be put together along
                dimension 0.
        """
        if not torch.is_grad_enabled():
            return self._outputs(inputs)
        sizes = self._sizes(inputs, None)
        with self._engine.one_at_a_time():
            self._measure_once(inputs)
            run = self._new_run("train", self.step, split(inputs, sizes), with_grad=True)
            self.step += 1
            outputs = run_as_module(self._engine, run, inputs, sizes)
            self._note(run, Mode.FORWARDS)
        return outputs

    def _outputs(self, inputs: Any) -> Any:
        sizes = self._sizes(inputs, None)
        with self._engine.one_at_a_time():
            try:
                with rewound_default_generators(self.devices):
                    run = self._drive_evaluation(inputs, sizes, trusting=True)
            except RandomnessError:  # a layer draws in evaluation mode: look at each as it runs
                run = self._drive_evaluation(inputs, sizes, trusting=False)
            self._evaluations += 1
        with torch.no_grad():
            return gather([run.outputs[i] for i in range(len(sizes))], sizes)

    def _drive_evaluation(self, inputs: Any, sizes: list[int], *, trusting: bool) -> Run:
        run = self._new_run("eval", self._evaluations, split(inputs, sizes), with_grad=False)
        run.trusts_evaluation = trusting
        self._engine.drive(run, Mode.EVAL)
        return run

    # -- inside ---------------------------------------------------------------------------------

    def _sizes(self, inputs: Any, targets: Any) -> list[int]:
        num_samples = batch_size(inputs, "inputs")
        if targets is not None:
            num_targets = batch_size(targets, "targets")
            if num_targets != num_samples:
                raise BatchError(
                    f"inputs hold {num_samples} samples, targets {num_targets}; dimension 0 of "
                    "both is the batch"
                )
        return microbatch_sizes(num_samples, self._num_microbatches)

    def _new_run(self, phase: str, step: int, inputs: list[Any], *, with_grad: bool) -> Run:
        return Run(
            inputs=inputs,
            loss=None,
            caller=CallerContext.capture(with_grad, self.devices),
            phase=phase,
            step=step,
            seed=self.seed,
            trace=self.trace,
        )

    def _measure_once(self, inputs: Any) -> None:
        """Balance the layers by measured time, the first time that a batch is at hand."""
        if self._cut_by != _BY_COUNTS:
            return
        part = split(inputs, self._sizes(inputs, None))[0]
        costs_s = measure_layers(self._layers, part, self._threads)
        partition = balance(costs_s, self._num_stages)
        stage_s = [sum(costs_s[i] for i in row) for row in _rows(partition)]
        self._cut_by = (
            f"balanced by measured time: slowest stage {max(stage_s) * 1e3:.3g} ms a micro-batch, "
            f"{max(stage_s) * len(stage_s) / sum(stage_s):.2f} times the mean"
        )
        if partition != self.partition:
            self._engine.cut(partition, self.devices)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> "Pipeline":
        """Move or cast the layers (`to`, `half`); a stage then runs where its parameters are."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        devices = []
        for stage in self._engine.stages:
            tensors = (t for step in stage.plan.steps for t in _tensors(step.module))
            devices.append(
                next(
                    (t.device for t in tensors),
                    fn(torch.empty(0, device=stage.device.device)).device,
                )
            )
        self._engine.cut(self.partition, devices)
        return self

    def close(self) -> None:
        """End the worker threads, as garbage collection does; the next call starts new ones."""
        self._engine.close()

    def __enter__(self) -> "Pipeline":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_BY_COUNTS = "balanced by parameter counts, until the first batch is measured"


@dataclass(frozen=True, slots=True)
class _Objective:
    """The user's loss; in a container, so that a loss that is a module does not become a layer."""

    loss: LossFunction | None
    reduction: Reduction | Callable[[Any], Any]


def _rows(partition: Sequence[int]) -> Iterator[range]:
    start = 0
    for count in partition:
        yield range(start, start + count)
        start += count


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
