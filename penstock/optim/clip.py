"""Gradient clipping by the norm over all stages, in one process or many."""

import math
from collections.abc import Sequence
from functools import reduce
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_

from penstock.errors import ConfigError
from penstock.runtime.pipeline_module import check_pipeline, parts_of
from penstock.torch_private import foreach_norm, grouped_by_kind

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline


class _Norm(NamedTuple):
    """The norm of one gradient, its type, and the type of the gradient."""

    name: str
    value: float
    dtype: str
    of: str


def clip_grad_norm_(
    pipe: "Pipeline",
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale all gradients down so that their norm, over the whole model, is at most `max_norm`.

    Has the bits of `torch.nn.utils.clip_grad_norm_` on the unsplit model, for every number of
    stages and processes.  The norm is taken of the norms of single gradients, in the order of the
    model's parameters; a parameter of several stages counts once.  With replicas or shards
    (`sharding=`) norms are added in float64 instead, so that "zero1" has the bits of plain
    replicas.  In a mesh of processes all of them call this alike, after `train_step`; equal
    gradients of replicas count once.

    Args:
        pipe: the pipeline.
        max_norm: the largest norm allowed; above 0. `math.inf` only measures the norm.
        norm_type: the p of the p-norm; `float("inf")` for the largest absolute value.
        error_if_nonfinite: raise an error if the norm is inf or nan.
        foreach: use torch's functions over many tensors; None: where torch does.

    Returns:
        The norm before clipping, a scalar tensor; the same in every process.

    Raises:
        ConfigError: `pipe` is no pipeline, `max_norm` or `norm_type` is not above 0, or the
            schedule has moved the weights already.
        RuntimeError: the norm is inf or nan, and `error_if_nonfinite`; no gradient is changed.
    """
    check_pipeline(pipe)
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not float(value) > 0:
            raise ConfigError(f"{name}={value!r}; it must be above 0")
    # 1. Compute the norm of each gradient, and gather those of all stages.
    named = pipe.named_parameters()
    gradients: dict[str, Tensor] = {name: p for name, p in named if p.grad is not None}
    norms = _of_all_stages(pipe, _norms(pipe, gradients, float(norm_type), foreach))
    if pipe.plan.schedule.is_asynchronous and not norms:
        raise ConfigError(
            f"schedule={pipe.plan.schedule!r} updates weights while it runs, and there is no "
            "gradient left to clip: the norm over all stages is not known before the first of "
            "them updates. Use a synchronous schedule, or a lower learning rate"
        )
    # 2. Add the norms in the order of the unsplit model: so the total has its bits.
    total = _total(norms, float(norm_type))
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"the total norm of order {norm_type} of the gradients is {float(total)}, so it "
            "cannot be clipped; leave error_if_nonfinite out to scale by it all the same"
        )
    # 3. Scale the gradients of this process.
    if gradients and max_norm != math.inf:
        parameters = list(gradients.values())
        device = parameters[0].device
        clip_grads_with_norm_(parameters, max_norm, total.to(device), foreach)
    return total


def _norms(
    pipe: "Pipeline", gradients: dict[str, Tensor], norm_type: float, foreach: bool | None
) -> list[_Norm]:
    """Return the norms of gradients; of weights in slices, over all their shards."""
    values: list[Tensor] = []
    for parameter in gradients.values():
        gradient = parameter.grad
        assert gradient is not None
        values.append(gradient.coalesce().values() if gradient.is_sparse else gradient)
    if pipe.sharding is None and pipe.mesh.num_replicas == 1:
        norms = _each_norm(values, norm_type, foreach)
    else:
        wide = [torch.linalg.vector_norm(v.abs().double(), norm_type) for v in values]
        shards, weights = parts_of(pipe).shards, list(gradients.values())
        sums = shards.norms(weights, list(map(float, wide)), norm_type)
        norms = list(torch.tensor(sums, dtype=torch.float64))
    return [
        _Norm(name, float(norm), _name(norm), _name(value))
        for name, norm, value in zip(gradients, norms, values, strict=True)
    ]


def _each_norm(tensors: list[Tensor], norm_type: float, foreach: bool | None) -> list[Tensor]:
    """Return the norm of each tensor, with the bits of torch's clipping."""
    if foreach is False or not tensors or any(type(tensor) is not Tensor for tensor in tensors):
        return [torch.linalg.vector_norm(tensor, norm_type) for tensor in tensors]
    norms: dict[int, Tensor] = {}
    for (group,), places in grouped_by_kind([tensors], with_indices=True).values():
        norms.update(zip(places, foreach_norm(group, norm_type), strict=True))
    return [norms[place] for place in range(len(tensors))]


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _of_all_stages(pipe: "Pipeline", norms: list[_Norm]) -> list[_Norm]:
    """Return the norms of all stages in the order of the model, the loss's last."""
    pipe.mesh.world.begin_call("clip_grad_norm_", parts_of(pipe).number)
    mine = [tuple(norm) for norm in norms] if pipe.mesh.speaks else []
    gathered = pipe.mesh.stages.gather(mine, "for the gradient norms of the other stages")
    order = {name: place for place, name in enumerate(parts_of(pipe).held.names)}
    all_norms = [_Norm(*norm) for of_process in gathered for norm in of_process]
    return sorted(all_norms, key=lambda norm: order.get(norm.name, len(order)))


def _total(norms: Sequence[_Norm], norm_type: float) -> Tensor:
    """Return the norm of norms, in torch's order of types and devices; 0 without any."""
    if not norms:
        return torch.tensor(0.0)
    values = [torch.tensor(norm.value, dtype=getattr(torch, norm.dtype)) for norm in norms]
    like = [torch.empty((), dtype=getattr(torch, norm.of)) for norm in norms]
    groups = grouped_by_kind([like], with_indices=True).values()
    in_order = [values[place] for _, places in groups for place in places]
    total: Tensor = torch.linalg.vector_norm(torch.stack(in_order), norm_type)
    return total.to(reduce(torch.promote_types, (tensor.abs().dtype for tensor in like)))
