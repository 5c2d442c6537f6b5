"""Say what to use instead where a pipeline is used as something that it is not."""

from collections.abc import Mapping
from typing import Any

from penstock.errors import ConfigError
from penstock.torch_private import DDP_ASKS_FOR

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


def hint_for(name: str, attributes: Mapping[str, Any]) -> str:
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


def refuse_fsdp(wrapper: type) -> None:
    """Raise ConfigError for the subclass of a pipeline that fully_shard makes."""
    if any(base.__name__ == "FSDPModule" for base in wrapper.__mro__):
        raise ConfigError(f"fully_shard {_WRAPPER}")
