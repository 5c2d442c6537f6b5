"""The tensors that a stage owns: parameters and buffers that last longer than a step.

    of its layers                parameters and buffers of their modules
    between them                 parameters and buffers that a captured model's code reads first on
                                 this stage, such as a class token; later stages receive them
    of the loss, if it is here   parameters and buffers of a loss that is a module

Gradient sums, the start of replicas, checks of weights and checkpoints all read this list.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.errors import ConfigError
from penstock.torch_private import buffers_of, parameters_of

LOSS = "loss"
"""The name of a loss that is a module, as a child of the pipeline."""

Slot = tuple[Mapping[str, Any], str]
"""(the dictionary in which a module has a parameter or a buffer, its name there)."""


@dataclass(frozen=True, slots=True)
class Between:
    """The slots of parameters and buffers that code between the layers of a stage reads."""

    parameters: tuple[Slot, ...] = ()
    buffers: tuple[Slot, ...] = ()

    @classmethod
    def of(
        cls, model: nn.Module, names: Sequence[str], own: Sequence[str], blocks: Collection[str]
    ) -> "Between":
        """Find parameters of `names` outside the `own` blocks, and buffers outside all blocks."""
        modules = [model.get_submodule(block) for block in own]
        of_blocks = {id(p) for module in modules for p in module.parameters()}
        inside = tuple(f"{block}." for block in blocks)
        every = (name for name, _ in model.named_buffers(remove_duplicate=False))
        buffers = (name for name in every if not name.startswith(inside))
        parameters = (place_of(model, name) for name in names)
        return cls(
            tuple(
                (h, last) for h, last in parameters if last in h and id(h[last]) not in of_blocks
            ),
            tuple(place_of(model, name) for name in buffers),
        )


NOTHING = Between()


def place_of(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return the dictionary that holds a parameter or buffer, and its name there."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    return (parameters_of(owner) if last in parameters_of(owner) else buffers_of(owner)), last


def modules_of_loss(loss: Any) -> tuple[nn.Module, ...]:
    """Return the loss if it is a module; it may have parameters and buffers."""
    return (loss,) if isinstance(loss, nn.Module) else ()


def with_loss(registered: dict[str, Any], children: str, loss: Any) -> dict[str, Any]:
    """Return a pipeline's dictionaries, with a loss that has state among its `children`.

    A ConfigError refuses a model that has a child of that name.
    """
    if not any((*m.parameters(), *m.buffers()) for m in modules_of_loss(loss)):
        return registered
    if LOSS in registered[children]:
        raise ConfigError(
            f"loss={type(loss).__name__}(...) has parameters or buffers, which a pipeline has as "
            f"{LOSS!r}, and the model has a child of that name; give the child another one"
        )
    return {**registered, children: {**registered[children], LOSS: loss}}
