"""Tensors that a stage owns: all that it computes with, and that last longer than a step.

    of its layers                parameters and buffers of their modules
    between them                 what a captured model's own code reads, on this stage first: a
                                 class token, positions, a scale; later stages are sent it
    of the loss, if it is here   those of a loss that is a module

Whoever sums gradients, lets replicas start alike, watches weights or keeps them takes them from
here.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from penstock.errors import ConfigError
from penstock.torch_private import buffers_of, parameters_of

LOSS = "loss"
"""The name by which a pipeline has a loss that is a module."""

Slot = tuple[Mapping[str, Any], str]
"""(the dictionary in which a module has a parameter or a buffer, its name there)."""


@dataclass(frozen=True, slots=True)
class Between:
    """Where parameters and buffers are held that the code between the layers of a stage reads."""

    parameters: tuple[Slot, ...] = ()
    buffers: tuple[Slot, ...] = ()

    @classmethod
    def of(
        cls, model: nn.Module, names: Sequence[str], own: Sequence[str], blocks: Collection[str]
    ) -> "Between":
        """Return where a model has the parameters of these names that none of the stage's `own`
        blocks has, and the buffers that none of all `blocks` has.
        """
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
    """Return the dictionary in which a module has the parameter or buffer, and its name there."""
    path, _, last = name.rpartition(".")
    owner = model.get_submodule(path)
    return (parameters_of(owner) if last in parameters_of(owner) else buffers_of(owner)), last


def modules_of_loss(loss: Any) -> tuple[nn.Module, ...]:
    """Return the loss, if it is a module, which may have parameters and buffers."""
    return (loss,) if isinstance(loss, nn.Module) else ()


def with_loss(registered: dict[str, Any], children: str, loss: Any) -> dict[str, Any]:
    """Return what a pipeline registers, with a loss that has state among its `children`.

    Raises:
        ConfigError: the model has a child of that name.
    """
    if not any((*m.parameters(), *m.buffers()) for m in modules_of_loss(loss)):
        return registered
    if LOSS in registered[children]:
        raise ConfigError(
            f"loss={type(loss).__name__}(...) has parameters or buffers, which a pipeline has as "
            f"{LOSS!r}, and the model has a child of that name; give the child another one"
        )
    return {**registered, children: {**registered[children], LOSS: loss}}
