"""A model with a batch and a loss, for `plan`, `profile` and `check`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from penstock.costs.cluster import Cluster, Device
from penstock.costs.counting.layer_weights import MakeOptimizer, layer_weights
from penstock.costs.profile import Profile
from penstock.errors import ConfigError
from penstock.model.batch import batch_size
from penstock.model.capture.capture import capture, resolve_layers
from penstock.model.layers import Layers
from penstock.model.pytree import tree_map
from penstock.planner.mesh_task import SHARDINGS
from penstock.runtime.devices import why_missing
from penstock.runtime.microbatches import microbatch_sizes
from penstock.runtime.profiling import profile
from penstock.types import Reduction

_PROFILED_SIZES = (1, 4, 16, 64)
"""Samples of the micro-batches that are profiled for a plan, beside the target's own."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A model, a batch and the settings of training: all that planning and checking need.

    Packages add kinds of targets by an entry point in the group `penstock.targets`: a function of
    (name, overrides, options, needs_values) that returns one, or None for a name of another kind.
    `overrides` are "SECTION.KEY=VALUE", and `options` are the arguments of `Pipeline` that the
    command line gives.
    """

    name: str
    make_model: Callable[[], Any]
    """Makes the model with its initial weights; called on the meta device where shapes do."""
    inputs: Any
    """A batch, as the model takes it."""
    targets: Any = None
    """Its targets, as the loss takes them."""
    loss: Callable[[Any, Any], Tensor] | None = None
    reduction: "Reduction | Callable[[Any], Any]" = Reduction.MEAN
    make_example: Callable[[], Any] | None = None
    """Returns a smaller batch to capture a model that is not a chain; default: `inputs`."""
    optimizer: MakeOptimizer = torch.optim.AdamW
    precision: torch.dtype = torch.float32
    """The dtype of autocast in a training step."""
    num_microbatches: int = 1
    """Micro-batches of the batch over all replicas."""
    num_replicas: int = 1
    fixed_microbatches: int | None = None
    """The number of micro-batches that a plan must have; None: the planner chooses."""
    threads_per_stage: int = 1
    shardings: Sequence[str] = SHARDINGS
    """The ready plans by which the devices of a stage may share it."""
    measure: bool = False
    """Whether a plan for accelerators runs the layers first, and takes times."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of `penstock.check`: the model's own number of stages, schedule and so on."""

    @classmethod
    def of(cls, model: Any, inputs: Any, targets: Any = None, loss: Any = None) -> "Target":
        """Return the target of a made model, as `Pipeline` takes it."""
        name = type(model).__name__
        fields = {"name": name, "make_model": lambda: model, "inputs": inputs}
        return cls(targets=targets, loss=loss, **fields)

    @property
    def batch_size(self) -> int:
        """Samples of the batch."""
        is_alone = self.targets is None
        return batch_size(self.inputs if is_alone else self.targets, "the batch")

    def layers_of(self, model: Any) -> Any:
        """Return the layers for a pipeline: a chain as it is, another model captured."""
        if isinstance(model, nn.Module) and not isinstance(model, nn.Sequential):
            return capture(model, self.make_example() if self.make_example else self.inputs)
        return model

    def resolved(self) -> Layers:
        """Return the model's layers, made where the default device is."""
        return resolve_layers(self.layers_of(self.make_model()), self.inputs)

    def profile(
        self,
        sizes: Sequence[int] = (),
        device: Device | None = None,
        *,
        busy: bool = False,
        kind: str | None = None,
    ) -> Profile:
        """Measure the model here, or count what its layers do on a device.

        Args:
            sizes: samples of micro-batches; default: those of the first micro-batch.
            busy: measure again while all other cores do the same.
            kind: the type of device to measure on, as "cpu"; default: an accelerator if there is
                one.
        """
        options: dict[str, Any] = {
            "targets": self.targets,
            "loss": self.loss,
            "microbatch_sizes": sizes or (self._microbatch_size,),
            "optimizer": self.optimizer,
            "threads": self.threads_per_stage,
            "name": f"{self.name}, {str(self.precision).removeprefix('torch.')}",
        }
        # 1. Count without values if a device is described.
        if device is not None:
            return self._counted(device, options)
        here = torch.device(kind or ("cuda" if torch.cuda.is_available() else "cpu"))
        # 2. Measure: make the model on the device, and run it as a training step would.
        model = self.make_model()
        if isinstance(model, nn.Module):
            model = model.to(here)
        options["targets"] = _moved(self.targets, here)
        is_lower = self.precision is not torch.float32
        precision = self.precision if is_lower else torch.bfloat16
        layers, inputs = self.layers_of(model), _moved(self.inputs, here)
        with torch.autocast(here.type, precision, enabled=is_lower):
            return profile(layers, inputs, busy=busy, **options)

    def profiles_for(
        self,
        cluster: Cluster,
        sizes: Sequence[int] = (),
        *,
        measure: bool | None = None,
        threads: Sequence[int] = (),
    ) -> list[Profile]:
        """Profile the model for a cluster, once for each number of threads of a rank.

        Args:
            sizes: samples of micro-batches; default: a few up to the batch.
            measure: whether layers are measured, here, instead of counted; default: the target's.
            threads: intra-op threads of a rank on cores, of which each takes one; layers are
                measured while all cores are busy, too.  Default: the target's, each rank having
                one device.

        Raises:
            ConfigError: the cluster has cores of another machine, or layers are to be measured
                and nothing here is of the cluster's kind.
        """
        # 1. Without measuring, count the layers for the accelerators, or else for the cores.
        sizes = sizes or sizes_up_to(self.batch_size, self._microbatch_size)
        devices = cluster.devices.values()
        is_measured = self.measure if measure is None else measure
        accelerators = [device for device in devices if device.torch_type != "cpu"]
        first = (accelerators or [*devices])[0]
        if not is_measured:
            return [self.profile(sizes, first)]
        # 2. Measure on an accelerator, or with the target's own number of threads.
        if lacks := why_missing(first.torch_type):
            raise ConfigError(
                f"to measure layers for {cluster.name}, they run on one of its devices, and "
                f"{lacks}; plan where there is one, or leave out pipeline.measure and "
                "--measure, by which seconds are estimated"
            )
        if not threads or accelerators:
            return [self.profile(sizes, kind=first.torch_type)]
        # 3. Measure on the cores of this machine, for each number of threads.
        cores = [name for name in cluster.devices if name != "core"]
        if cores:
            raise ConfigError(
                f"the cluster {cluster.name} has CPUs called {cores[0]!r}, and only those of this "
                'machine, "core", can be measured; give --profile with a profile that was made '
                "there"
            )
        targets = (replace(self, threads_per_stage=n) for n in threads)
        return [target.profile(sizes, busy=True, kind=first.torch_type) for target in targets]

    @property
    def _microbatch_size(self) -> int:
        per_replica = self.num_microbatches // self.num_replicas
        return microbatch_sizes(self.batch_size // self.num_replicas, per_replica)[0]

    def _counted(self, device: Device, options: dict[str, Any]) -> Profile:
        """Count the layers without values, all of them in the target's precision."""
        with torch.device("meta"):
            model = self.make_model()
        layers = resolve_layers(self.layers_of(model), self.inputs)
        weights, inputs = layer_weights(layers, options["optimizer"]), self.inputs
        if self.precision is not torch.float32 and isinstance(model, nn.Module):
            model.to(self.precision)  # after the weights were counted, which stay in float32
            inputs = tree_map(
                lambda t: t.to(self.precision) if t.is_floating_point() else t, inputs
            )
        kind = device.torch_type
        counted = profile(layers, inputs, measure=False, torch_type=kind, **options)
        pairs = zip(weights, counted.weights, strict=True)  # bytes as they are kept
        as_kept = tuple(replace(own, num_norms=lower.num_norms) for own, lower in pairs)
        return replace(counted, weights=as_kept)


def sizes_up_to(batch_size: int, *others: int) -> list[int]:
    """Return the samples of micro-batches to profile for plans of a batch, and these others."""
    few = (size for size in _PROFILED_SIZES if size <= batch_size)
    return sorted({batch_size, *few, *others})


def _moved(value: Any, device: torch.device) -> Any:
    return tree_map(lambda tensor: tensor.to(device), value)
