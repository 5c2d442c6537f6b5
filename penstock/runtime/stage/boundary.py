"""Check values that leave a stage, find those that share memory, and check the loss."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.errors import BoundaryError, ConfigError
from penstock.model.entries import can_be_made_again, is_plain_class
from penstock.model.pytree import Structure, opaque_values


def check_leaving(
    leaves: Sequence[Tensor], structure: Structure, stage: int, peer: int, *, any_shape: bool
) -> None:
    """Refuse values that would change when they cross to another stage.

    With `any_shape`, values without a batch dimension may cross: a captured model's code between
    blocks uses them for one micro-batch only.

    Raises:
        BoundaryError: a tensor has no batch dimension, is of a class that does not cross, or may
            be inside an object.
    """
    for value in opaque_values(structure):
        raise BoundaryError(
            f"a {type(value).__name__} leaves stage {stage} for stage {peer}; a tensor inside it "
            "would lose its gradient. Only tensors, numbers, strings, None, and tuples, lists, "
            "dicts and dataclasses of them cross stages: return one of those, or keep the layers "
            "that use it on one stage"
        )
    # A scalar of a micro-batch is not the batch's: receivers could not cut it.
    check_classes(leaves, f"leaves stage {stage} for stage {peer}")
    for leaf in leaves:
        if leaf.dim() == 0 and not any_shape:
            raise BoundaryError(
                f"a tensor without a batch dimension (shape ()) leaves stage {stage} for stage "
                f"{peer}: a value reduced over a micro-batch is not what the whole batch would "
                "give. Return one value per sample, or a Python number, or keep its producer and "
                "its users on one stage"
            )


def check_classes(tensors: Iterable[Tensor | None], what_it_does: str) -> None:
    """Raise BoundaryError for tensors that hold more than their values and their class."""
    for tensor in tensors:
        if tensor is None or is_plain_class(tensor) or can_be_made_again(tensor):
            continue
        raise BoundaryError(
            f"a {type(tensor).__name__} of shape {tuple(tensor.shape)} {what_it_does}; what it "
            "holds beside its values would be lost. Plain tensors cross, and subclasses of "
            "torch.Tensor that hold nothing of their own (no __torch_dispatch__, no attributes) "
            "and stand in a module where every process can import them. Return plain tensors, or "
            "keep the layers that use it on one stage"
        )


def check_routes(exported: Mapping[int, Sequence[Tensor]], stage: int) -> None:
    """Raise BoundaryError for one tensor that leaves under two names for two stages.

    Its gradients would come back in two messages and add up in another order than unsplit.
    """
    seen: dict[int, int] = {}
    for peer, leaves in exported.items():
        for leaf in leaves:
            if leaf.requires_grad and seen.setdefault(id(leaf), peer) != peer:
                raise BoundaryError(
                    f"one tensor of shape {tuple(leaf.shape)} leaves stage {stage} under two "
                    f"names, for stages {peer} and {seen[id(leaf)]}, so its gradients would not "
                    "add up in the order of the unsplit model. Let both stages read one name, or "
                    "return a copy (x.clone()) under the second"
                )


def check_loss(loss: Any, with_grad: bool) -> None:
    """Raise ConfigError for a loss that is no scalar, or that needs a gradient and has none."""
    if not isinstance(loss, Tensor) or loss.dim() != 0:
        got = (
            f"a tensor of shape {tuple(loss.shape)}"
            if isinstance(loss, Tensor)
            else type(loss).__name__
        )
        raise ConfigError(
            f"the loss function returned {got}; it must reduce a micro-batch to one number (a "
            "tensor of shape ()). Take its mean and use Reduction.MEAN, or its sum and use "
            "Reduction.SUM"
        )
    if with_grad and not loss.requires_grad:
        raise ConfigError(
            "the loss depends on no parameter that requires grad, so there is nothing to train; "
            "check frozen parameters, .detach() and torch.no_grad() in the model and the loss"
        )


# -- tensors that share memory: an in-place change of one must be visible in the other --


def find_aliases(
    exported: Mapping[int, Sequence[Tensor]], known: Iterable[Tensor] = ()
) -> dict[int, frozenset[int]]:
    """Return, for each peer, the places of tensors that share memory with another tensor.

        address ──►  a a a b b b . c d c d c d        c and d: columns of the same rows count too

    `known` are tensors that arrived as aliases: a tensor that overlaps with one is an alias too.
    """
    places = [(peer, place) for peer, leaves in exported.items() for place in range(len(leaves))]
    tensors = [exported[peer][place] for peer, place in places]
    aliases: dict[int, set[int]] = {}
    for number in _overlapping([*tensors, *known]):
        if number < len(places):
            peer, place = places[number]
            aliases.setdefault(peer, set()).add(place)
    return {peer: frozenset(of_peer) for peer, of_peer in aliases.items()}


def _overlapping(tensors: Sequence[Tensor]) -> Iterator[int]:
    """Yield the numbers of the tensors whose address ranges overlap with another tensor's."""
    extents = [(*_extent(t), n) for n, t in enumerate(tensors) if t.layout is torch.strided]
    crowd: list[int] = []
    furthest = 0
    for start, end, number in sorted(extent for extent in extents if extent[0] < extent[1]):
        if start >= furthest:
            yield from crowd if len(crowd) > 1 else ()
            crowd = []
        crowd.append(number)
        furthest = max(furthest, end)
    yield from crowd if len(crowd) > 1 else ()


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return a tensor's address range: its first byte, and the byte behind its last."""
    start, size = tensor.data_ptr(), tensor.element_size()
    if not tensor.numel():
        return start, start
    steps = ((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + size * (1 + sum(steps))
