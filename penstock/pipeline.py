"""`Pipeline`: train a model as a pipeline of stages."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from penstock.checkpoint.pretrained.load import load_and_tell
from penstock.checkpoint.together import Share
from penstock.errors import ConfigError, check_count
from penstock.mesh import Mesh
from penstock.model.capture.capture import resolve_layers
from penstock.model.layer_list import Layer
from penstock.model.layers import Layers
from penstock.model.state import in_evaluation
from penstock.planner.arguments import Arguments, Undecided, check_loss, reduction_of
from penstock.planner.plan import Plan
from penstock.runtime.asynchronous import (
    WeightUpdater,
    as_pairs,
    check_updating,
    cut_all,
    losses,
    run_window,
    train_one_by_one,
)
from penstock.runtime.compiled import Compile, compile_layers
from penstock.runtime.construction import described, make_engine, plan_after_move
from penstock.runtime.gradient_dtype import check_gradient_dtype, name_of_dtype
from penstock.runtime.memory.stores import folder_for_files
from penstock.runtime.microbatch_warnings import warn_of_other_reduction
from penstock.runtime.microbatches import (
    Call,
    LossFunction,
    check_loss_scale,
    check_targets,
    first_microbatch,
)
from penstock.runtime.module_form import (
    accumulate_into_inputs,
    check_undivided,
    evaluate,
    run_as_module,
)
from penstock.runtime.pipeline_module import PipelineModule
from penstock.runtime.planning import (
    Devices,
    agree,
    balance,
    device_names,
    free_of_ranks,
    make_plan,
)
from penstock.runtime.record import Record, as_trace
from penstock.runtime.run import Run
from penstock.runtime.shard import check_sharding, make_sharding
from penstock.schedules.family import Chosen
from penstock.schedules.ir import Schedule
from penstock.schedules.lower import Mode
from penstock.trace.timeline import Timeline
from penstock.trace.units import count_text
from penstock.types import (
    CheckBatches,
    Outputs,
    RecomputePolicy,
    Reduction,
    TiedGradients,
    Trace,
    Transport,
    word_of,
)


class Pipeline(PipelineModule):
    """Trains a layered model as a pipeline of K stages over M micro-batches.

    The gradients are those of the unsplit model run micro-batch after micro-batch, to the bit, for
    every K, schedule, recompute policy and transport (with as many intra-op threads on both
    sides).  Where a value of an enum is taken, its word may be given: recompute="never".

    Args:
        layers: an nn.Sequential, a list of modules and `penstock.Layer`s, or any nn.Module with
            `example_inputs` (see `penstock.capture`); the pipeline uses them without a copy.
        num_stages: K.  Measured times of layers balance the stages: of `example_inputs` now, else
            of the first batch; until then parameter counts do.
        partition: layers per stage, instead of `num_stages`.
        num_microbatches: M; default: 4 for each rank of a replica (GPipe, section 2.3).  A batch
            of N < M samples runs as N micro-batches; sizes differ by at most 1.
        loss: (output, target) -> scalar tensor for one micro-batch.  `train_step` needs it, except
            for a captured model that computes its loss from labels among its inputs.
        reduction: the reduction of `loss` over a micro-batch; or a function target -> weight, such
            as the number of real tokens (of the inputs, if there is no target).  Weighted losses
            of the micro-batches sum to the loss of the mini-batch.
        schedule: the name of a family ("1f1b", "interleaved", "zb-h1", "zbv", ...), one of
            `penstock.schedules`, a Schedule of this size, or your function (num_stages,
            num_microbatches) -> Schedule; default: one_f_one_b.  It also assigns stages to ranks
            (threads or processes).
        memory_limit_bytes: the most activation memory of a rank, in bytes, with older versions of
            weights but without weights and gradients.  It replaces `recompute`: the cheapest
            policy within the limit is chosen by measurement.  `offload` then lists stages that may
            offload if recomputing is not enough.  One number for all ranks, or one for each.
        recompute: activations to compute twice instead of keeping: those of stages ("stage"), of
            each layer ("layers"), of some layers (Recompute.layers("block3", 5)), or none
            ("never"); one policy for all stages, or one for each.  Default: "stage"; where layers
            are measured and all ranks have GPUs, the cheapest policy that their free memory
            allows, beside weights, gradients and two moments of Adam.
        offload: True moves activations to the host's memory, on CPUs to files, until shortly
            before their backward; one for all stages, or one for each; default: False.
        offload_folder: the folder of these files; default: that of temporary files (TMPDIR).
        devices: one per stage, or one for all; default: the visible GPUs in turn, one for each
            rank's stages, else the CPU.
        seed: the seed of the layers' random streams; default: 0.
        example_inputs: a batch to balance the layers with, and to capture a model with.
        threads_per_stage: intra-op threads of a stage on the CPU, at most the cores; default:
            torch's, divided among the process's ranks.  Another count may round differently.
        transport: the carrier of values between stages; default: worker threads of one process,
            torch.distributed between processes.
        trace: the record of each step, in `last_timeline`.  All processes record the strongest
            trace of any of them, for all stages of their replica.
        timeout_s: deadline of each wait between stages, in seconds, by default 600; between
            processes the mesh's counts.
        mesh: the processes, from `penstock.init_mesh`.  All make the same pipeline and the same
            calls.  Each holds the layers of its stages; other layers move to the meta device.
            Layers built on the meta device get values from their `reset_parameters` and `seed`.
        batch_norm_over_replicas: pool BatchNorm's moments over the replicas of the mesh too.
        weights: a folder to load, as by `load_pretrained`, instead of drawing values.
        tied_gradients: the number of sends for the gradient of a weight that several stages use;
            default: PER_MICROBATCH.
        gradient_dtype: torch.float32 or torch.float64: `.grad` of parameters of lower precision
            has this dtype, and micro-batches and replicas add up in it; default: the parameter's.
        sharding: the layouts of operators on the ranks of a stage (docs/sharding.md): a name such
            as "auto" or "megatron", or layouts of weights by name.  Needs `example_inputs`.
        check_batches: the steps at which ranks of a replica compare the values of their batches;
            default: the first eight steps and each hundredth.
        outputs: the ranks that get the outputs of `pipe(inputs)` in training; default: all.
        cuda_graphs: capture `train_step` as one CUDA graph of each process (docs/cuda_graphs.md).
        compile: True compiles each layer in place with `torch.compile`, or a dictionary of its
            options does; default: False.  Equal layers are compiled once.
        plan: a plan to run, such as another pipeline's; instead of num_stages, partition,
            num_microbatches, schedule, memory_limit_bytes, recompute, offload, offload_folder,
            devices, seed, threads_per_stage, transport, timeout_s, batch_norm_over_replicas,
            tied_gradients, gradient_dtype and sharding.

    Raises:
        ConfigError: an argument cannot work, or is given beside a plan that decides it.
        PartitionError: the layers do not allow the partition.
        CheckpointError: `weights` belong to another model.
    """

    def __init__(  # noqa: PLR0913 - the front door: each a keyword with a default
        self,
        layers: "nn.Module | Sequence[nn.Module | Layer] | Layers",
        num_stages: int | None = None,
        *,
        partition: Sequence[int] | None = None,
        num_microbatches: int | None = None,
        loss: LossFunction | None = None,
        reduction: Reduction | str | Callable[[Any], Any] = Reduction.MEAN,
        schedule: Chosen | None = None,
        recompute: RecomputePolicy | str | Sequence[RecomputePolicy | str] | None = None,
        memory_limit_bytes: int | Sequence[int] | None = None,
        offload: bool | Sequence[bool] | None = None,
        offload_folder: str | os.PathLike[str] | None = None,
        devices: Devices = None,
        seed: int | None = None,
        example_inputs: Any = None,
        threads_per_stage: int | None = None,
        transport: Transport | str | None = None,
        trace: Trace | str | bool = Trace.OFF,
        timeout_s: float | None = None,
        mesh: Mesh | None = None,
        batch_norm_over_replicas: bool | None = None,
        weights: str | os.PathLike[str] | None = None,
        tied_gradients: TiedGradients | str | None = None,
        gradient_dtype: torch.dtype | str | None = None,
        sharding: str | Mapping[str, Any] | None = None,
        check_batches: CheckBatches | str = CheckBatches.FIRST,
        outputs: Outputs | str = Outputs.ALL,
        cuda_graphs: bool = False,
        compile: Compile = False,
        plan: Plan | None = None,
    ) -> None:
        # 1. Make the plan of the arguments, or check the one that was given.
        resolved = resolve_layers(layers, example_inputs)
        arguments = Arguments(
            num_stages=num_stages,
            partition=partition,
            num_microbatches=num_microbatches,
            schedule=schedule,
            recompute=recompute,
            memory_limit_bytes=memory_limit_bytes,
            offload=offload,
            offload_folder=folder_for_files(offload_folder),
            devices=device_names(devices, mesh),
            seed=seed,
            threads_per_stage=threads_per_stage,
            transport=transport,
            timeout_s=timeout_s,
            batch_norm_over_replicas=batch_norm_over_replicas,
            tied_gradients=tied_gradients,
            gradient_dtype=name_of_dtype(gradient_dtype),
            sharding=sharding,
        )
        check_loss(loss)
        reduce, records = reduction_of(reduction), as_trace(trace)
        check_batches = word_of("check_batches", check_batches, CheckBatches)
        given = arguments if plan is None else None
        undecided = given.undecided if given else Undecided()
        plan = make_plan(arguments, plan, resolved, mesh)
        part = first_microbatch(example_inputs, plan.num_microbatches)
        mesh = mesh or Mesh.of_one_process(plan.placement.num_places, plan.timeout_s)
        check_sharding(plan, part)
        check_gradient_dtype(plan.gradient_dtype)
        loss, draws = loss or resolved.own_loss, weights is None
        computes = loss is resolved.own_loss is not None
        wanted = Call(plan.num_microbatches, reduce, computes_loss=computes)
        warn_of_other_reduction(resolved, example_inputs, wanted)
        # 2. Agree on it with the other processes; cut the layers into stages.
        with mesh.world.reporting(plan.placement.names):
            compiled = compile_layers(resolved, compile, plan)
            alike = {"check_batches": check_batches, "compile": compiled}
            alike |= {"cuda_graphs": cuda_graphs}
            plan, number, undecided = agree(plan, resolved, mesh, part, alike, undecided)
            # the stages are agreed on; a loss of the model's own is among its layers
            divided = make_sharding(plan, resolved, part, mesh, None if computes else loss)
            how: Any = {"draws": draws, "sharding": divided, "cuda_graphs": cuda_graphs}
            engine = make_engine(resolved, loss, plan, mesh, **how)
            super().__init__()
            self._layers, self._engine = resolved, engine
            self.__dict__.update(resolved.registered(engine.holds, engine.loss_here))
            engine.splitter.number = number
            engine.splitter.check_batches(check_batches)
        self._wanted, self._undecided = wanted, undecided
        self._by_default = given.by_default(plan) if given else ""
        self.step, self.evaluations = 0, 0
        self._trace, self._outputs_on = records, word_of("outputs", outputs, Outputs)
        self._record: Record | None = None
        self._timeline: Timeline | None = None
        self._none = [nn.Parameter(torch.empty(0, device=mesh.device))] if mesh.processes else []
        with self._engine.reporting():
            self._engine.shards.start_equal(self._engine.tensors())
            load_and_tell(weights, Share.of(self))
        self._balance_by(part)

    # -- a training step ------------------------------------------------------------------------

    def train_step(
        self, inputs: Any = None, targets: Any = None, *, loss_scale: float = 1.0, **keywords: Any
    ) -> Tensor:
        """Run one synchronous step: forwards, losses and backwards of all micro-batches.

            loss = pipe.train_step(inputs, targets)
            loss = pipe.train_step(**batch)  # a captured model, which computes its own loss

        Args:
            inputs: a tensor, or any nest of containers of tensors, of shape (N, ...); goes to the
                first layer as its one argument.  A captured model is called with a mapping of
                keyword arguments, a tuple of positional ones, or a single value.  Arrays, and
                lists without tensors, have N entries and are cut likewise; see `penstock.Whole`
                for what every micro-batch is to have.
            targets: likewise, of the same N; None if the loss needs none.
            loss_scale: multiplies all gradients, so that small ones are not lost in float16; see
                `penstock.GradScaler`.  The same on every process.
            keywords: of a captured model, its keyword arguments, instead of `inputs`.

        Returns:
            The loss of the mini-batch, a detached scalar tensor, not scaled.  Gradients are added
            to `.grad` of the parameters (and of inputs that require it); activations are freed.

        Raises:
            BatchError: inputs and targets cannot be cut into the same micro-batches.
            ConfigError: there is no loss, it is no scalar, nothing wants a gradient, or
                `loss_scale` is not above 0.
            MeshError: the processes do not make the same call.
            PenstockError: the pipeline is running already, in another thread or around this call.
            Exception: whatever a layer raised, with stage, layer and micro-batch noted.
                Gradients are then incomplete: zero them.
        """
        self._check_can_train("train_step")
        if self._engine.is_asynchronous:
            raise ConfigError(
                f"schedule={self.plan.schedule!r} updates the weights while it runs; give the "
                "optimizer and several batches to pipe.train_steps(batches, optimizer), or use a "
                "synchronous schedule"
            )
        check_targets(targets)
        if keywords:
            inputs = self._layers.as_one_value(() if inputs is None else (inputs,), keywords)
        with self._engine.shared.lock.taken(), self._engine.reporting():
            scale = check_loss_scale(loss_scale)
            call = replace(self._wanted, trains=True, loss_scale=scale, trace=self._trace)
            run = self._begin_step(inputs, targets, call)
            engine = self._engine
            run.loss, run.loss_gradients = engine.loss, [w * scale for w in run.batch.weights]
            engine.drive(run, Mode.TRAIN)
            self._record, self._timeline = engine.record(run, Mode.TRAIN), None
            loss = engine.splitter.loss(run.losses)
        # Outside the lock: hooks on the inputs' gradients may call the pipeline.
        if run.input_gradients:
            accumulate_into_inputs(inputs, run)
        return loss

    def train_steps(
        self,
        batches: Iterable[tuple[Any, Any]],
        optimizer: torch.optim.Optimizer,
        *,
        lr_scheduler: Any = None,
    ) -> Tensor:
        """Train on several mini-batches, one after the other, and update the weights.

            losses = pipe.train_steps(batches, optimizer)

        With a synchronous schedule this is `train_step`, `optimizer.step()` and
        `optimizer.zero_grad()` for each.  With an asynchronous one (`schedules.pipedream_2bw`) the
        mini-batches follow each other without a flush, and each stage updates its weights when
        the schedule says; after the last one all stages have seen all updates.

        Args:
            batches: (inputs, targets) of each, as `train_step` takes them; all are read first.
            optimizer: of `pipe.parameters()`; treats each parameter by itself, as SGD and AdamW
                do.
            lr_scheduler: its `step()` is called once after each mini-batch; with an asynchronous
                schedule beforehand, to know the options of every update.

        Returns:
            The loss of each mini-batch, as `train_step` returns it, in a tensor of shape (W,).

        Raises:
            ConfigError: the optimizer cannot move the weights stage by stage.
            BatchError: the mini-batches have not as many micro-batches.
            Exception: whatever `train_step` raises.  With an asynchronous schedule stages may have
                made some of the updates: load a checkpoint.
        """
        updating = WeightUpdater(optimizer, lr_scheduler)
        check_updating(updating, dict(self.named_parameters()).values())
        pairs = as_pairs(batches)
        if not self._engine.is_asynchronous:
            return train_one_by_one(self.train_step, pairs, updating)
        self._check_can_train("train_steps")
        for _, targets in pairs:
            check_targets(targets)
        with self._engine.shared.lock.taken(), self._engine.reporting():
            call = replace(self._wanted, trains=True, trace=self._trace)
            cut = cut_all(self._engine, pairs, call)
            self._balance_by(cut[0].inputs[0])
            engine, step = self._engine, self.step
            self.step += len(cut)
            # One run for all mini-batches: the schedule overlaps them.
            run = run_window(engine, cut, step, updating)
            self._record, self._timeline = engine.record(run, Mode.TRAIN), None
            return losses(engine, cut, run)

    def _begin_step(self, inputs: Any, targets: Any, call: Call) -> Run:
        """Cut a mini-batch, and count the step that will run it."""
        batch = self._engine.splitter.cut(inputs, targets, call)
        self._balance_by(batch.inputs[0])
        run = self._engine.new_run(batch, "train", self.step, with_grad=True)
        self.step += 1
        return run

    def _check_can_train(self, call: str) -> None:
        if self._engine.loss is None:
            raise ConfigError(
                f"{call} needs a loss; give Pipeline(..., loss=...), or use pipe(inputs)"
            )
        if not torch.is_grad_enabled():
            raise ConfigError(
                f"{call} was called under torch.no_grad(); use eval_step, or leave that block"
            )

    # -- outputs --------------------------------------------------------------------------------

    def eval_step(self, *inputs: Any, **keywords: Any) -> Any:
        """Return the model's outputs for a batch, in evaluation mode and without gradients.

        May be called between training steps: each module's mode is restored.

        Args:
            inputs: as in `forward`.
            keywords: likewise.

        Raises:
            BoundaryError: the outputs of the micro-batches cannot be put together along
                dimension 0.
            ConfigError: layers were given something else than one value.
        """
        with self._engine.shared.lock.taken():  # before the modes change: a step may be running
            everyone = [*self.modules(), *self.original.modules()]
            with in_evaluation(everyone):
                return self._outputs(inputs, keywords)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Return the model's outputs for the whole batch, as the unsplit model does.

        Compute any loss from them and call `backward()`: the stages then run their backward
        passes and add to `.grad`, as in `train_step`.  Without gradients (torch.no_grad())
        nothing is kept.

        Between processes every rank calls this, computes the same loss from the outputs that it
        gets (see `penstock.Outputs`), and calls `backward()`.  Each replica has the outputs of its
        own samples; the gradient is that of the mean of the replicas' losses.

        Parameters are not in the graph of the outputs: `torch.autograd.grad(loss, parameters)`
        finds no gradients, and `torch.autograd.grad(loss, inputs)` also adds to their `.grad`.

        Args:
            inputs: the one value that the first layer is given; of a captured model, what its own
                forward is given, or all of it in one value as for `train_step`.
            keywords: of a captured model, its keyword arguments, in any order.

        Raises:
            BoundaryError: the outputs of the micro-batches cannot be put together along
                dimension 0.
            ConfigError: layers were given something else than one value.
        """
        with self._engine.shared.lock.taken():
            if not torch.is_grad_enabled():
                return self._outputs(inputs, keywords)
            check_undivided(self.plan.sharding)
            value = self._layers.as_one_value(inputs, keywords)
            call = replace(self._wanted, returns=True, trace=self._trace)
            with self._engine.reporting():
                run = self._begin_step(value, None, call)
                outputs = run_as_module(self._engine, run, value, self._outputs_on)
                self._record, self._timeline = self._engine.record(run, Mode.FORWARDS), None
            return outputs

    def _outputs(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Run forwards only; return the gathered outputs, the same in all processes."""
        with self._engine.reporting():
            value = self._layers.as_one_value(inputs, keywords)
            outputs = evaluate(self._engine, value, self._wanted, self.evaluations)
            self.evaluations += 1
            return outputs

    # -- what it is ---------------------------------------------------------------------------

    @property
    def trace(self) -> Trace:
        """The kind of trace that steps record in `last_timeline`; True stands for Trace.TIME."""
        return self._trace

    @trace.setter
    def trace(self, trace: Trace | str | bool) -> None:
        self._trace = as_trace(trace)

    @property
    def last_timeline(self) -> Timeline | None:
        """The timeline of the last training step; None if it was not traced."""
        if self._timeline is None and self._record is not None:
            self._timeline = self._record.timeline()
        return self._timeline

    def schedule_for(self, num_microbatches: int | None = None) -> Schedule:
        """Return the lowered, verified schedule that `train_step` executes."""
        count = self.num_microbatches if num_microbatches is None else num_microbatches
        return self._engine.program(Mode.TRAIN, check_count("num_microbatches", count))

    def __repr__(self) -> str:
        plan = self.plan
        head = f"Pipeline({count_text(plan.num_stages, 'stage')}, "
        head += f"{count_text(plan.num_microbatches, 'micro-batch')}, "
        until = "until the first batch is measured" if self._undecided.balance else ""
        cut = ", ".join(filter(None, (f"  partition {list(plan.partition)}", plan.balance, until)))
        lines = (head + plan.choices, cut, self._by_default, *described(self._engine), ")")
        return "\n".join(filter(None, lines))

    # -- another plan, another place ----------------------------------------------------------

    def _balance_by(self, part: Any) -> None:
        """Partition the layers by measured time, once, with the first micro-batch available."""
        undecided = self._undecided
        if undecided.balance and part is not None:
            self._engine.check_unchanged()
            self._undecided = Undecided()
            free = free_of_ranks(self.plan, self.mesh) if undecided.recompute else None
            self._run_as(balance(self.plan, self._layers, part, free))

    def _run_as(self, plan: Plan) -> None:
        before = self._engine
        self._engine = make_engine(self._layers, before.loss, plan, before.mesh, before=before)

    def _after_move(self, function: Callable[..., Any]) -> None:
        """Run each stage on the device of its parameters (after `to`, `half`)."""
        self._run_as(plan_after_move(self._engine, function))

    def close(self) -> None:
        """End the worker threads, as garbage collection does; the next call starts new ones."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
