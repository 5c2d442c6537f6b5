"""Run functions of vision networks and of vocabularies on shards.

    mean            the sum here, divided by the number of elements on all devices
    group_norm      the groups of this device's channels
    batch_norm      statistics of all devices, in forward and backward; buffers written whole
    embedding       this device's rows, zeros for other words
    cross_entropy   the maximum and the sum over a cut vocabulary are of all devices

Kernels handle several axes: one may cut samples and another channels, or both one dimension.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from penstock.costs.counting.classify import tensors_in
from penstock.sharding.layouts import I, Layout, P, R, S, State, Whole

from .convert import convert
from .sizes import Function, Kernel, Local

_PURPOSE = "for the other shards of a vocabulary"


_Named = tuple[dict[str, Any], dict[str, Layout]]
"""The arguments of a call by name, and the layouts of the tensors among them."""


def _named(names: str, args: Any, kwargs: Any, local: Local) -> _Named:
    """Name arguments; a plan's layouts come in the order of the distinct tensors."""
    values = {**dict(zip(names.split(), args, strict=False)), **kwargs}
    tensors = dict.fromkeys(map(id, tensors_in((args, kwargs))))
    layouts = dict(zip(tensors, local.sized.takes, strict=True))
    return values, {n: layouts[id(x)] for n, x in values.items() if id(x) in layouts}


def _mean(func: Function, args: Any, kwargs: Any, local: Local) -> Tensor:
    tensor, *rest = args
    (layout,) = local.sized.takes
    dims = kwargs.get("dim", rest[0] if rest else None)
    dims = (dims,) if isinstance(dims, int) else tuple(dims or range(tensor.dim()))
    if not any(local.is_cut(layout, dim % tensor.dim()) for dim in dims):
        return func(*args, **kwargs)
    whole = local.whole_shape(tensor.shape, layout)
    mean: Tensor = tensor.sum(*rest, **kwargs) / prod(whole[dim] for dim in dims)
    return mean.to(kwargs.get("dtype") or tensor.dtype)  # autocast has sums in float32


def _convolution(func: Function, args: Any, kwargs: Any, local: Local) -> Tensor:
    last = "dilation groups"
    if func.__name__.startswith("conv_transpose"):
        last = "output_padding groups dilation"
    names = f"input weight bias stride padding {last}"
    return _grouped(func, _named(names, args, kwargs, local), local, "groups", ("weight", 0))


def _group_norm(func: Function, args: Any, kwargs: Any, local: Local) -> Tensor:
    given = _named("input num_groups weight bias eps", args, kwargs, local)
    return _grouped(func, given, local, "num_groups", ("input", 1))


def _grouped(
    func: Function, given: _Named, local: Local, groups: str, channels: tuple[str, int]
) -> Tensor:
    """Call a function with the number of groups here; `channels`: a tensor, its dimension."""
    (values, layouts), (name, dim) = given, channels
    shape, count = values[name].shape, values.get(groups, 1)
    if count > 1:
        count = count * shape[dim] // local.whole_shape(shape, layouts[name])[dim]
    return func(**{**values, groups: count})


def _instance_norm(func: Function, args: Any, kwargs: Any, local: Local) -> Tensor:
    """Also accept an empty batch, which torch's function of this name refuses."""
    values, _ = _named("input running_mean running_var weight bias", args, kwargs, local)
    x = values["input"]
    if x.numel():
        return func(*args, **kwargs)
    return F.group_norm(x, x.shape[1], values.get("weight"), values.get("bias"))


# -- batch_norm -----------------------------------------------------------------------------------


def _batch_norm(func: Function, args: Any, kwargs: Any, local: Local) -> Tensor:
    """Normalise by the statistics of the whole, and update all running statistics.

    Running statistics are whole on each device.  A device changes a copy of its channels, because
    the backward reads the arguments of `func`, and then gathers the other channels.
    """
    names = "input running_mean running_var weight bias training momentum eps"
    values, layouts = _named(names, args, kwargs, local)
    layout = layouts["input"]
    own: tuple[State, ...] = tuple(_along(state, 1, 0) for state in layout)
    running = [values.get(name) for name in ("running_mean", "running_var")]
    here = [None if buffer is None else local.part_of(buffer, own).clone() for buffer in running]
    values |= {"running_mean": here[0], "running_var": here[1]}
    training = values.get("training", False)
    if training and any(isinstance(state, S) and state.dim != 1 for state in layout):
        result = _normalized(values, local, layout)
    else:
        result = func(**values)
    for whole, part in zip(running, here, strict=True):
        if training and whole is not None and part is not None:
            whole.copy_(convert(part, own, (I,) * len(own), local.axes))
    return result


def _along(state: State, before: int, after: int, other: Whole = I) -> State:
    """Return slices along dimension `before` as slices along `after`; `other` for other states."""
    is_same = isinstance(state, S) and state.dim == before
    return S(after, state.sizes) if is_same and isinstance(state, S) else other


def _normalized(values: dict[str, Any], local: Local, layout: Layout) -> Tensor:
    """Normalise values that are cut along samples or positions.

    Statistics are sums over all devices, and `convert` sums their gradients too.  The backward
    keeps only the distance of x from the mean.
    """
    x = values["input"]
    shape = local.whole_shape(x.shape, layout)
    count = prod(shape[:1] + shape[2:])
    if count == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got {shape}")
    # 1. Compute the moments over all devices, in float32 at least.
    x_wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims = [dim for dim in range(x.dim()) if dim != 1]
    wide = [1, -1] + [1] * (x.dim() - 2)
    mean = _summed(x_wide.sum(dims) / count, local, layout)
    distance = x_wide - mean.view(wide)
    variance = _summed(distance.square().sum(dims) / count, local, layout)

    # 2. Normalise, scale and shift.
    scale = (variance + values.get("eps", 1e-5)).rsqrt()
    if values.get("weight") is not None:
        scale = scale * values["weight"]
    result = distance * scale.view(wide)
    if values.get("bias") is not None:
        result = result + values["bias"].view(wide)

    # 3. Move the running statistics, by the unbiased variance.
    with torch.no_grad():
        momentum = values.get("momentum", 0.1)
        moved = (values["running_mean"], mean), (values["running_var"], variance)
        for (running, moment), times in zip(moved, (1, count / (count - 1)), strict=True):
            if running is not None:
                running.lerp_((moment * times).to(running.dtype), momentum)
    normalized: Tensor = result.to(x.dtype)
    return normalized


def _summed(part: Tensor, local: Local, layout: Layout) -> Tensor:
    """Return the sum of one number per channel over the devices with other samples."""
    parts = tuple(
        _along(state, 1, 0, P if isinstance(state, S) else I)  # replicated samples are no part
        for state in layout
    )
    return convert(part, parts, tuple(R if s is P else s for s in parts), local.axes)


# -- vocabularies ---------------------------------------------------------------------------------


def _embedding(func: Function, args: Any, kwargs: Any, local: Local) -> Tensor:
    """Look up words in this device's rows of a table; other words give zeros."""
    values, layouts = _named("input weight padding_idx", args, kwargs, local)
    words, table, layout = values["input"], values["weight"], layouts["weight"]
    if not local.is_cut(layout, 0):
        return func(*args, **kwargs)
    start, here = local.start(layout, 0), table.shape[0]
    padding = values.get("padding_idx")
    if padding is not None:
        padding = padding % local.whole_shape(table.shape, layout)[0] - start
        padding = padding if 0 <= padding < here else None
    places = words - start
    is_other = (places < 0) | (places >= here)
    rows = F.embedding(places.masked_fill(is_other, 0), table, padding)
    return rows.masked_fill(is_other.unsqueeze(-1), 0)


def _loss(func: Function, args: Any, kwargs: Any, local: Local) -> Tensor:
    """Compute the losses of the samples here; a mean divides by the weight of all samples."""
    names = "input target weight size_average ignore_index reduce reduction label_smoothing"
    values, layouts = given = _named(names, args, kwargs, local)
    layout, class_dim = layouts["input"], 1 if values["input"].dim() > 1 else 0
    if not any(isinstance(state, S) for state in layout):
        return func(*args, **kwargs)
    if local.is_cut(layout, class_dim):
        losses = _of_cut_vocabulary(given, local, class_dim, is_log=func.__name__ == "nll_loss")
    else:
        losses = func(**{**values, "reduction": "none"})
    reduction = values.get("reduction", "mean")
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / _weight_of_all(given, local, losses)


def _weight_of_all(given: _Named, local: Local, losses: Tensor) -> Tensor:
    """Return the sum of the weights of all samples' targets."""
    values, layouts = given
    target = values["target"]
    with torch.no_grad():
        if target.is_floating_point():
            here = losses.new_tensor(losses.numel())
        else:
            counted = target != values.get("ignore_index", -100)
            weight = values.get("weight")
            words = target.masked_fill(~counted, 0)
            weights = losses.new_ones(()) if weight is None else weight[words]
            here = (weights * counted).sum()
        parts = tuple(P if isinstance(s, S) else I for s in layouts["target"])
        return convert(here, parts, (I,) * len(parts), local.axes)


def _of_cut_vocabulary(given: _Named, local: Local, class_dim: int, *, is_log: bool) -> Tensor:
    """Return this device's parts of the losses: the scores of its words.

    The first device adds the term of all words, the logarithm of the sum of exponentials.
    """
    values, layouts = given
    scores, target, layout = values["input"], values["target"], layouts["input"]
    if torch.is_autocast_enabled(scores.device.type):
        scores = scores if scores.dtype is torch.float64 else scores.float()  # as of all words
    smoothing = 0.0 if is_log else values.get("label_smoothing", 0.0)
    start, here = local.start(layout, class_dim), scores.shape[class_dim]
    count = local.whole_shape(scores.shape, layout)[class_dim]
    # 1. Take the score of each target that is a word of this device.
    # A target on another device scores 0 here; the sum over devices has its score once.
    # A target that is no word fails in `gather`, on all devices.
    places, is_ignored = target - start, target == values.get("ignore_index", -100)
    is_other = (places < 0) | (places >= here)
    is_other &= is_ignored | ((target >= 0) & (target < count))
    index = places.masked_fill(is_other, 0).unsqueeze(class_dim)
    scored = scores.gather(class_dim, index).squeeze(class_dim).masked_fill(is_other, 0)
    losses = (smoothing - 1) * scored
    # 2. Add the other terms of the loss: label smoothing, and the term of all words.
    if smoothing:
        losses = losses - smoothing / count * scores.sum(class_dim)
    if not is_log:
        pairs = zip(local.axes, layout, strict=True)
        axes = [axis for axis, x in pairs if isinstance(x, S) and x.dim == class_dim]
        of_all = _log_sum_exp(scores, class_dim, axes)  # replicated: only the first device adds it
        losses = losses + convert(of_all, (I,) * len(axes), (P,) * len(axes), axes)
    counted: Tensor = losses.masked_fill(is_ignored, 0)
    return counted


def _log_sum_exp(scores: Tensor, dim: int, axes: Sequence[Any]) -> Tensor:
    """Return the log-sum-exp over the whole vocabulary, on each device."""
    # Subtract the maximum of all devices, so that no exponential overflows.
    highest = scores.detach().amax(dim)
    for axis in axes:
        axis.all_reduce(highest, _PURPOSE, by=dist.ReduceOp.MAX)
    exponentials = (scores - highest.unsqueeze(dim)).exp().sum(dim)
    total = convert(exponentials, (P,) * len(axes), (I,) * len(axes), axes)
    return total.log() + highest


_CONVOLUTIONS = [f"conv{way}{n}d" for way in ("", "_transpose") for n in (1, 2, 3)]
KERNELS: dict[str, Kernel] = {
    "mean": _mean,
    **dict.fromkeys(_CONVOLUTIONS, _convolution),
    "group_norm": _group_norm,
    "instance_norm": _instance_norm,
    "batch_norm": _batch_norm,
    "embedding": _embedding,
    **dict.fromkeys(("cross_entropy", "nll_loss"), _loss),
}
