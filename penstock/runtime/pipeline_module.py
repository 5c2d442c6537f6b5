"""The part of a pipeline that any nn.Module has: its layers and state, and what describes it."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self, TypeGuard

import torch
from torch import nn

from penstock.errors import ConfigError, shown
from penstock.mesh import Mesh
from penstock.model.layers import Layers
from penstock.model.state import Held
from penstock.planner.plan import Plan
from penstock.sharding.plan import Sharding
from penstock.torch_private import DDP_ASKS_FOR, AbstractMovable

from .engine import Engine
from .shards.at_rest import CutWeights

_INSTEAD: Mapping[str, str] = {
    "generate": "a pipeline trains and evaluates; penstock.save_pretrained(pipe, folder) writes "
    "the model, which generates after from_pretrained(folder)",
    "save_pretrained": "penstock.save_pretrained(pipe, folder) writes the whole model",
    "push_to_hub": "penstock.save_pretrained(pipe, folder) writes a folder that can be uploaded",
    "gradient_checkpointing_enable": 'give Pipeline(..., recompute="layers")',
    "device": "each stage has one: pipe.devices",
    "no_sync": "gradients are summed over replicas once a step: give more micro-batches instead",
    "train_batch": "a step is pipe.train_step(inputs, targets)",
}
"""Names that other libraries have, and what a pipeline has for them."""
_TRAINER_ASKS_FOR = "accepts_loss_kwargs"
"""The attribute that the Trainer of transformers looks for in its model."""
_WRAPPER = (
    "around a pipeline would add up each rank's own stages. A pipeline has replicas itself: "
    "penstock.init_mesh(num_stages=..., num_replicas=...), under torchrun; "
    'Pipeline(..., sharding="zero3") also divides their weights'
)


@dataclass(frozen=True, slots=True)
class Parts:
    """The state of a pipeline in this process, for checkpoints and clipping.

    `number` counts the pipelines of the mesh.  `held` are the tensors here, and the extra state of
    the modules that run here; `shards` the slices of weights among them.
    """

    number: int
    held: Held
    shards: CutWeights


class PipelineModule(AbstractMovable):
    """The base of `penstock.Pipeline`, which adds the calls.

    `step` counts training steps and `evaluations` calls without gradients: both are keys of the
    layers' random streams, and stand in checkpoints.
    """

    step: int
    evaluations: int
    _layers: Layers
    _engine: Engine
    _none: list[nn.Parameter]
    """A parameter without elements, for a process where nothing trains."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        _refuse_fsdp(cls)
        super().__init_subclass__(**keywords)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            raise AttributeError(f"{error}{_hint_for(name, self.__dict__)}") from None

    # -- layers and state -----------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: int | slice) -> "nn.Module | nn.Sequential":
        """Return a layer, or several as an nn.Sequential; other processes' have shapes only."""
        modules = [step.module for step in self._layers]
        return nn.Sequential(*modules[index]) if isinstance(index, slice) else modules[index]

    def __iter__(self) -> Iterator[nn.Module]:
        return (step.module for step in self._layers)

    @property
    def original(self) -> nn.Module:
        """The captured model; the pipeline itself if it was made of layers."""
        return self._layers.model or self

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters of this process's stages.

        If none of them trains (frozen stages, an idle process), yield one more without elements,
        name or gradient, so that optimizers accept them; no checkpoint has it.
        """
        here = [*super().parameters(recurse)]
        return iter(here if any(p.requires_grad for p in here) else here + self._none)

    def train(self, mode: bool = True) -> Self:
        """Set the training mode of all layers."""
        for module in self.original.modules():
            module.training = mode
        return super().train(mode)

    # -- what describes it ----------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan: all decisions about how this pipeline runs."""
        return self._engine.plan

    @property
    def num_stages(self) -> int:
        """The number of stages, K."""
        return self.plan.num_stages

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches, M; a batch of fewer samples has one for each."""
        return self.plan.num_microbatches

    @property
    def partition(self) -> tuple[int, ...]:
        """The number of layers on each stage."""
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
    def seed(self) -> int:
        """The seed of the layers' random streams."""
        return self.plan.seed

    @seed.setter
    def seed(self, seed: int) -> None:
        self._engine.plan = replace(self.plan, seed=seed)

    @property
    def mesh(self) -> Mesh:
        """The mesh of processes that run the stages, replicas and shards."""
        return self._engine.mesh

    @property
    def sharding(self) -> Sharding | None:
        """The sharding of operators, a table if printed; None if each stage has one rank."""
        return self._engine.shards.sharding


def _hint_for(name: str, attributes: Mapping[str, Any]) -> str:
    """Return the end of the message for a name that a pipeline lacks.

    A ConfigError tells DistributedDataParallel, and the Trainer of transformers, what to use.
    """
    if name == _TRAINER_ASKS_FOR:
        raise ConfigError(
            "Trainer(model=pipe) of transformers would call the pipeline as a plain model; use "
            "penstock.integrations.transformers.PenstockTrainer(pipe, args, ...)"
        )
    if name == DDP_ASKS_FOR:
        raise ConfigError(f"DistributedDataParallel {_WRAPPER}")
    if name in _INSTEAD:
        return f": {_INSTEAD[name]}"
    layers = attributes.get("_layers")
    has_it = layers is not None and layers.model is not None and hasattr(layers.model, name)
    return f"; the model that was captured has one: pipe.original.{name}" if has_it else ""


def _refuse_fsdp(wrapper: type) -> None:
    """Raise ConfigError for the subclass of a pipeline that fully_shard makes."""
    if any(base.__name__ == "FSDPModule" for base in wrapper.__mro__):
        raise ConfigError(f"fully_shard {_WRAPPER}")


def parts_of(pipe: PipelineModule) -> Parts:
    """Return the state of a pipeline in this process."""
    engine, layers = pipe._engine, pipe._layers
    held = Held(
        pipe,
        pipe.original,
        layers.elsewhere(engine.holds),
        is_part=pipe.mesh.world_size > 1,
        loss=engine.loss_here,
        names=layers.names(),
    )
    cut = CutWeights(dict(pipe.named_parameters(remove_duplicate=False)), engine.shards.cut)
    return Parts(engine.splitter.number, held, cut)


def has_input(pipe: PipelineModule, name: str) -> bool:
    """Tell whether a captured model may be given an input of this name in a step."""
    return pipe._layers.has_input(name)


def is_pipeline(module: object) -> TypeGuard[PipelineModule]:
    """Tell whether an object is a `penstock.Pipeline`."""
    return isinstance(module, PipelineModule)


def check_pipeline(pipe: object) -> None:
    """Raise ConfigError unless `pipe` is a `penstock.Pipeline`."""
    if not is_pipeline(pipe):
        raise ConfigError(f"pipe={shown(pipe)}; give the pipeline, a penstock.Pipeline")
