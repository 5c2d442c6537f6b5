"""The front door: a model as a pipeline."""

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.checkpoint.pretrained.load import load_and_tell
from penstock.mesh import Mesh
from penstock.model.capture.capture import resolve_layers
from penstock.model.layer_list import Layer
from penstock.model.layers import Layers
from penstock.planner.arguments import Arguments
from penstock.planner.plan import Plan
from penstock.runtime.abstract_pipeline import LossFunction, Wanted
from penstock.runtime.asynchronous import Updating
from penstock.runtime.planning import Devices, device_names
from penstock.runtime.stores import folder_for_files
from penstock.runtime.training import AbstractTraining
from penstock.schedules.family import Build
from penstock.schedules.ir import Schedule
from penstock.types import RecomputePolicy, Reduction, TiedGradients, Trace, Transport


class Pipeline(AbstractTraining):
    """Trains a layered model as a pipeline of K stages over M micro-batches.

    The gradients are those of the unsplit model run micro-batch after micro-batch, to the bit, for
    every K, schedule, recompute policy and transport (with as many intra-op threads on both
    sides).

    Args:
        layers: an nn.Sequential, a list of modules and `penstock.Layer`s, or any nn.Module with
            `example_inputs` (see `penstock.capture`); used as they are, not copied.
        num_stages: K.  Layers are balanced by measured time, as often as the schedule runs them:
            of `example_inputs` now, else of the first batch; until then by parameter counts.
        partition: layers per stage, instead of `num_stages`.
        num_microbatches: M, by default 1.  A batch of N < M samples runs as N micro-batches; sizes
            differ by at most 1.
        loss: (output, target) -> scalar tensor for one micro-batch; needed by `train_step`, but
            for a captured model that computes a loss itself, from labels among its inputs.
        reduction: how `loss` reduces over what it is given; or a function target -> weight, such
            as the number of real tokens (of the inputs, where there is no target).  Micro-batch
            losses are weighted so that they sum to the loss of the mini-batch.
        schedule: one of `penstock.schedules`, by default gpipe, a Schedule of this size, or a
            function of your own (num_stages, num_microbatches) -> Schedule; says which rank, a
            thread or a process, runs which stages.
        memory_limit_bytes: the most that a rank may keep for backwards (activations, and versions
            of weights beside the newest; weights and gradients come on top), instead of
            `recompute`: what layers keep is measured like their times, and what costs least is
            chosen that fits; `offload` then says what may be moved away where recomputing is not
            enough.  One number for all ranks, or one for each.
        recompute: which activations to compute twice instead of keeping: those of stages (STAGE),
            of some layers (Recompute.layers("block3", 5)), or none; one choice for all stages, or
            one for each; default: STAGE.
        offload: whether what forwards keep is moved away until shortly before its backward: to the
            host's memory, on CPUs to files; one for all stages, or one for each; default: False.
        offload_folder: where these files go; default: where temporary files go (TMPDIR).
        devices: one per stage, or one for all; default: the visible GPUs in turn, one for each
            rank's stages, else the CPU.
        seed: of the layers' random streams; default: 0.
        example_inputs: a batch to balance the layers with, and to capture a model with.
        threads_per_stage: intra-op threads of a stage on the CPU, at most the cores; default:
            torch's, divided among the process's ranks.  Another count may round differently.
        transport: what carries values between stages; default: worker threads of one process,
            torch.distributed between processes.
        trace: what to record of each step, in `last_timeline`; between processes the strongest
            that any of them asks for, of all stages of the own replica.
        timeout_s: deadline of every wait between stages, in seconds, by default 600; between
            processes the mesh's counts.
        mesh: who runs what (`penstock.init_mesh`).  In a mesh of processes each makes the same
            pipeline and the same calls; each holds the layers of its own stages, and the others
            lose their memory (they move to the meta device).  Layers built on the meta device get
            values where they run, from their `reset_parameters` and `seed`.
        batch_norm_over_replicas: pool BatchNorm's moments over the replicas of the mesh too.
        weights: a folder to load, as by `load_pretrained`, instead of drawing values.
        tied_gradients: how often the gradient of a weight that several stages use is sent;
            default: PER_MICROBATCH.
        plan: how to run, as another pipeline's `plan` says; instead of num_stages, partition,
            num_microbatches, schedule, memory_limit_bytes, recompute, offload, offload_folder,
            devices, seed, threads_per_stage, transport, timeout_s, batch_norm_over_replicas and
            tied_gradients.

    Raises:
        ConfigError: an argument cannot work, or is given beside a plan that decides it.
        PartitionError: the layers cannot be cut as asked.
        CheckpointError: `weights` are not this model's.
    """

    def __init__(  # noqa: PLR0913 - the front door: each a keyword with a default
        self,
        layers: "nn.Module | Sequence[nn.Module | Layer] | Layers",
        num_stages: int | None = None,
        *,
        partition: Sequence[int] | None = None,
        num_microbatches: int | None = None,
        loss: LossFunction | None = None,
        reduction: Reduction | Callable[[Any], Any] = Reduction.MEAN,
        schedule: Build | Schedule | None = None,
        recompute: RecomputePolicy | Sequence[RecomputePolicy] | None = None,
        memory_limit_bytes: int | Sequence[int] | None = None,
        offload: bool | Sequence[bool] | None = None,
        offload_folder: str | os.PathLike[str] | None = None,
        devices: Devices = None,
        seed: int | None = None,
        example_inputs: Any = None,
        threads_per_stage: int | None = None,
        transport: Transport | None = None,
        trace: Trace | bool = Trace.OFF,
        timeout_s: float | None = None,
        mesh: Mesh | None = None,
        batch_norm_over_replicas: bool | None = None,
        weights: str | os.PathLike[str] | None = None,
        tied_gradients: TiedGradients | None = None,
        plan: Plan | None = None,
    ) -> None:
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
        )
        wanted = Wanted(example_inputs, loss, reduction, trace, draws=weights is None)
        super().__init__(resolved, arguments, plan, mesh, wanted)
        with self._engine.reporting():
            load_and_tell(weights, self.held, self.mesh)
        self._balance_by_example(example_inputs)

    # -- a training step ------------------------------------------------------------------------

    def train_step(self, inputs: Any, targets: Any = None, *, loss_scale: float = 1.0) -> Tensor:
        """Run one synchronous step: forwards, losses and backwards of all micro-batches.

        Args:
            inputs: a tensor, or any nest of containers of tensors, of shape (N, ...); goes to the
                first layer as its one argument.  A captured model is called with a mapping of
                keyword arguments, a tuple of positional ones, or a single value.  Arrays, and
                lists without tensors, have N entries and are cut likewise; see `penstock.Whole`
                for what every micro-batch is to have.
            targets: likewise, of the same N; None if the loss needs none.
            loss_scale: multiplies all gradients, so that small ones are not lost in float16; see
                `penstock.GradScaler`.  The same on every process.

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
        return self._train(inputs, targets, loss_scale)

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
        return self._train_all(batches, Updating(optimizer, lr_scheduler))

    # -- outputs --------------------------------------------------------------------------------

    def eval_step(self, *inputs: Any, **keywords: Any) -> Any:
        """Return the model's outputs for a batch of any size, in evaluation mode and without
        gradients.

        Every module is back in the mode it was in afterwards.  May be called at any time, also
        between steps of training.

        Args:
            inputs: as in `forward`.
            keywords: likewise.

        Raises:
            BoundaryError: the outputs of the micro-batches cannot be put together along
                dimension 0.
            ConfigError: layers were given something else than one value.
        """
        return self._evaluated(inputs, keywords)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Return the model's outputs for the whole batch, as the unsplit model does: a drop-in
        module.

        Compute any loss from them and call `backward()`: the stages then run their backward
        passes and add to `.grad`, as in `train_step`.  Without gradients (torch.no_grad())
        nothing is kept.

        The gradients of parameters are found in `.grad` only: parameters are not in the graph of
        the outputs, so `torch.autograd.grad(loss, parameters)` has none, and
        `torch.autograd.grad(loss, inputs)` adds those of the parameters to `.grad` too.

        Args:
            inputs: the one value that the first layer is given; of a captured model, what its own
                forward is given, or all of it in one value as for `train_step`.
            keywords: of a captured model, its keyword arguments, in any order.

        Raises:
            BoundaryError: the outputs of the micro-batches cannot be put together along
                dimension 0.
            ConfigError: layers were given something else than one value.
        """
        return self._called(inputs, keywords)
