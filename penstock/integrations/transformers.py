"""`PenstockTrainer`: the Trainer of transformers, for a model that is a pipeline."""

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, find_batch_size
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments

import penstock
from penstock.errors import ConfigError
from penstock.integrations.peft import save_adapter
from penstock.runtime.pipeline_module import has_input

_STATE = "pipeline"  # in a checkpoint of the Trainer, the folder of Penstock's own
_REFUSED = {
    "gradient_accumulation_steps": (1, "micro-batches: Pipeline(num_microbatches=...)"),
    "label_smoothing_factor": (0, "a loss with smoothing: compute_loss_func"),
    "fp16": (False, "bf16=True, or a loop of your own with penstock.GradScaler"),
    **dict.fromkeys(
        ("gradient_checkpointing", "activation_checkpointing"), (False, "Pipeline(recompute=...)")
    ),
    **dict.fromkeys(
        ("fsdp", "deepspeed", "parallelism_config", "torch_compile", "auto_find_batch_size"),
        (None, "nothing: the pipeline divides the model itself"),
    ),
    **dict.fromkeys(
        [f"ddp_{key}" for key in ("find_unused_parameters", "bucket_cap_mb", "static_graph")]
        + ["ddp_broadcast_buffers"],
        (None, "nothing: the pipeline is not wrapped in DistributedDataParallel"),
    ),
}
"""Settings that do not fit a pipeline: the value allowed, and what to use instead."""


class PenstockTrainer(Trainer):
    """Trains a captured pipeline as transformers' Trainer trains a model.

    `trainer.model` is the captured model, `trainer.pipe` the pipeline.  Micro-batches of the
    pipeline take the place of gradient accumulation.  In several processes all make the same calls
    with the same whole batches, and rank 0 writes what is not divided.  A replica trains on its
    share of a batch, and evaluates all of it.

    Args:
        pipe: a Pipeline of a model that computes its loss from `labels`; with `compute_loss_func`,
            or a `compute_loss` of a subclass, of any model.
        args: the settings.
        options: whatever else transformers' Trainer takes.

    Raises:
        ConfigError: `pipe` is no captured pipeline, or not of all processes; a setting would wrap
            the model, accumulate gradients or change the loss; or replicas meet a loss of yours.
    """

    optimizer: Any
    lr_scheduler: Any
    model: Any

    def __init__(
        self, pipe: "penstock.Pipeline", args: TrainingArguments | None = None, **options: Any
    ) -> None:
        args = args or TrainingArguments()
        _check(pipe, args)
        self.pipe = pipe
        # The Trainer and Accelerate see one process, which has the whole batch and this rank.
        state: Any = args.distributed_state
        state.distributed_type, state.num_processes = DistributedType.NO, 1
        state.process_index = state.local_process_index = pipe.mesh.rank
        args._n_gpu = min(args.n_gpu, 1)
        super().__init__(pipe.original, args, **options)
        if self._has_own_loss and pipe.mesh.num_replicas > 1:
            raise ConfigError(
                f"a loss of yours needs the outputs of the whole batch, and each of the "
                f"{pipe.mesh.num_replicas} replicas has those of its share; let the model compute "
                "the loss, or use one replica"
            )
        needs_count = not self._has_own_loss and self.model_accepts_loss_kwargs
        if needs_count and not has_input(pipe, "num_items_in_batch"):
            raise ConfigError(
                "the pipeline was captured without num_items_in_batch, by which the model divides "
                "its loss; add it to the example: Pipeline(..., example_inputs={**batch, "
                "'num_items_in_batch': torch.tensor(1)}); or set model.accepts_loss_kwargs = "
                "False, if the model's loss is a mean that samples weigh"
            )

    @property
    def _has_own_loss(self) -> bool:
        overridden = type(self).compute_loss is not Trainer.compute_loss
        return self.compute_loss_func is not None or overridden

    def _wrap_model(self, *_: Any, **__: Any) -> nn.Module:
        return self.pipe

    def _move_model_to_device(self, *_: Any) -> None:
        """Leave each stage on its own device."""

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
        return self.accelerator.autocast()

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return super().get_decay_parameter_names(self.pipe.original)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer of the parameters of this process's stages."""
        return super().create_optimizer(self.pipe)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Any = None
    ) -> Tensor:
        """Run `train_step` of the pipeline, or `pipe(inputs)` where a loss of the caller's is."""
        if self._has_own_loss:
            return super().training_step(model, inputs, num_items_in_batch)
        self.pipe.train()
        inputs = _of_replica(self._prepare_inputs(inputs), self.pipe.mesh)
        if self.model_accepts_loss_kwargs and num_items_in_batch is not None:
            inputs["num_items_in_batch"] = num_items_in_batch
        with self.compute_loss_context_manager():
            return self.pipe.train_step(inputs).to(self.args.device)

    def _clip_grad_norm(self, _: nn.Module) -> Tensor:
        return penstock.clip_grad_norm_(self.pipe, self.args.max_grad_norm)

    def _get_grad_norm(self, _: nn.Module, grad_norm: Any = None) -> Any:
        return penstock.clip_grad_norm_(self.pipe, torch.inf) if grad_norm is None else grad_norm

    # -- checkpoints: the model as its library saves it, and beside it one of Penstock ---------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or str(self.args.output_dir))
        if hasattr(self.model, "peft_config"):
            save_adapter(folder, self.pipe)
        else:
            _save_over(folder, self.pipe)
        if self.args.should_save:
            torch.save(self.args, folder / "training_args.bin")
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = {"scheduler": self.lr_scheduler.state_dict()}
        new = Path(output_dir, f"{_STATE}.new")
        penstock.save_checkpoint(new, self.pipe, self.optimizer.optimizer, **state)
        if self.pipe.mesh.is_first_rank:  # a run that was resumed may come here once more
            shutil.rmtree(old := Path(output_dir, _STATE), ignore_errors=True)
            new.rename(old)
        _wait_for_first(self.pipe)

    def _save_rng_state(self, output_dir: str) -> None:
        if self.args.should_save:  # the generators that order batches are alike everywhere
            super()._save_rng_state(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if (folder := Path(resume_from_checkpoint, _STATE)).is_dir():
            penstock.load_checkpoint(folder, self.pipe)
        else:
            penstock.load_pretrained(resume_from_checkpoint, self.pipe)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint and (folder := Path(checkpoint, _STATE)).is_dir():
            state = penstock.load_checkpoint(folder, self.pipe, self.optimizer.optimizer)
            if self.lr_scheduler is not None:
                self.lr_scheduler.load_state_dict(state["scheduler"])

    def _load_best_model(self) -> None:
        if (best := self.state.best_model_checkpoint) is not None:
            self._load_from_checkpoint(best)


def _of_replica(batch: Any, mesh: "penstock.Mesh") -> dict[str, Any]:
    size = find_batch_size(batch)
    has_samples = {k for k, v in batch.items() if isinstance(v, Tensor) and v.shape[:1] == (size,)}
    return {
        key: value.tensor_split(mesh.num_replicas)[mesh.replica] if key in has_samples else value
        for key, value in batch.items()
    }


def _check(pipe: "penstock.Pipeline", args: TrainingArguments) -> None:
    """Refuse what would train another thing than the pipeline, naming each remedy."""
    if not isinstance(pipe, penstock.Pipeline) or pipe.original is pipe:
        raise ConfigError(
            f"PenstockTrainer trains a captured pipeline, not a {type(pipe).__name__}; give it "
            "penstock.Pipeline(model, num_stages=..., example_inputs=batch)"
        )
    processes = dist.get_world_size() if dist.is_initialized() else 1
    if pipe.mesh.world_size != processes:
        raise ConfigError(
            f"there are {processes} processes, but the pipeline has {pipe.mesh.world_size}: each "
            "would train a model of its own; give Pipeline(mesh=penstock.init_mesh(...))"
        )
    for name, (allowed, instead) in _REFUSED.items():
        value = getattr(args, name, None)
        if (value and value != allowed) or (value is False and allowed is None and "ddp" in name):
            raise ConfigError(f"TrainingArguments({name}={value!r}); use {instead}")


def _save_over(folder: Path, pipe: "penstock.Pipeline") -> None:
    """Save the model into a folder that may have other files; only those of a model go."""
    penstock.save_pretrained(folder / "new", pipe)
    if pipe.mesh.is_first_rank:
        for old in [*folder.glob("model*.safetensors"), *folder.glob("model*.index.json")]:
            old.unlink()
        for file in (folder / "new").iterdir():
            file.replace(folder / file.name)
        (folder / "new").rmdir()
    _wait_for_first(pipe)


def _wait_for_first(pipe: "penstock.Pipeline") -> None:
    """Wait until rank 0, which moves files, is here too."""
    if pipe.mesh.world_size > 1:
        dist.barrier()
