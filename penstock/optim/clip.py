"""Gradient clipping over all stages, wherever they run."""

from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.errors import ConfigError
from penstock.runtime.engine import check_pipeline

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline


def clip_grad_norm_(pipe: "Pipeline", max_norm: float) -> Tensor:
    """Scale all gradients down so that their norm, over the whole model, is at most `max_norm`.

    The norm is taken of the norms of single gradients in the order of the model's parameters, so
    it has the same bits for every number of stages and processes; a parameter counts once.  In a
    mesh of processes all of them call this alike, after `train_step`; replicas hold equal
    gradients and count once.

    Returns:
        The norm before clipping, a scalar tensor; the same in every process.

    Raises:
        ConfigError: `pipe` is no pipeline, `max_norm` is not above 0, or the schedule has moved
            the weights already.
    """
    check_pipeline(pipe)
    if not max_norm > 0:
        raise ConfigError(f"max_norm={max_norm!r}; it must be above 0")
    gradients = list(_gradients(pipe))
    norms = _whole_norms(pipe, gradients)
    in_order = [norm for _, norm in sorted(_of_all_stages(pipe, norms), key=itemgetter(0))]
    if pipe.plan.schedule.is_asynchronous and not in_order:
        raise ConfigError(
            f"schedule={pipe.plan.schedule!r} updates weights while it runs, and there is no "
            "gradient left to clip: the norm over all stages is not known before the first of "
            "them updates. Use a synchronous schedule, or a lower learning rate"
        )
    total = torch.linalg.vector_norm(torch.tensor(in_order, dtype=torch.float64))
    share = max_norm / (float(total) + 1e-6)
    if share < 1:
        for _, parameter in gradients:
            assert parameter.grad is not None
            parameter.grad.mul_(share)
    norm: Tensor = total.float()
    return norm


def _gradients(pipe: "Pipeline") -> Iterator[tuple[int, Tensor]]:
    """Yield each parameter here that has a gradient, with the number of its first layer.

    What belongs to no layer, as a parameter that a captured model's own code reads, comes last.
    """
    here, layers = dict.fromkeys(pipe.parameters()), enumerate(pipe)
    in_layers = [(n, p) for n, module in layers for p in module.parameters()]
    for layer, parameter in (*in_layers, *((len(pipe), p) for p in list(here))):
        if parameter in here:
            del here[parameter]
            if parameter.grad is not None:
                yield layer, parameter


def _whole_norms(
    pipe: "Pipeline", gradients: Sequence[tuple[int, Tensor]]
) -> list[tuple[int, float]]:
    """Return the norms of gradients, of weights that are cut over all their shards."""
    own = [float(torch.linalg.vector_norm(_values(p), dtype=torch.float64)) for _, p in gradients]
    if pipe.sharding is not None:
        own = pipe.shards.norms([p for _, p in gradients], own)
    return [(layer, norm) for (layer, _), norm in zip(gradients, own, strict=True)]


def _values(parameter: Tensor) -> Tensor:
    gradient = parameter.grad
    assert gradient is not None
    return gradient.coalesce().values() if gradient.is_sparse else gradient


def _of_all_stages(pipe: "Pipeline", norms: list[tuple[int, float]]) -> list[tuple[int, float]]:
    pipe.mesh.world.begin_call("clip_grad_norm_", pipe.number)
    own = norms if pipe.mesh.speaks else []
    everyone = pipe.mesh.stages.gather(own, "for the gradient norms of the other stages")
    return [pair for of_process in everyone for pair in of_process]
