"""The paper's models, counted on meta tensors: each once for each micro-batch size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import penstock
from penstock import Profile
from penstock.costs.records import AtSize, Part
from penstock_recipes.zoo.amoebanet import amoebanet_d
from penstock_recipes.zoo.gpt_family import transformer_lm

LENGTH = 1024
IMAGE, NUM_CLASSES = 224, 1001
_KERNELS = "unfused"
"""No fused attention or dropout: none of 2019's frameworks had these."""
_FEW = 4
"""Blocks of the Transformer that is counted; a deeper one repeats its second."""
_AT = 2
"""The layer that is repeated: after the embedding and the first block."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A model of the paper: its profile for micro-batches of some sizes, which is kept."""

    name: str
    profile: Callable[[tuple[int, ...]], Profile]


def transformer(num_blocks: int, *, has_head: bool = True) -> Subject:
    """Return the scaling model, without its last two layers and the loss if that is asked for."""
    name = f"Transformer-{num_blocks}"

    def profile(sizes: tuple[int, ...]) -> Profile:
        whole = deepened(_transformer(min(num_blocks, _FEW), sizes), max(0, num_blocks - _FEW))
        return whole if has_head else without_head(whole)

    return Subject(name, cache(profile))


def amoebanet(num_layers: int, num_filters: int, image: int = IMAGE) -> Subject:
    """Return AmoebaNet-D (L, D), with the auxiliary head that the public code trains it with."""
    name = f"AmoebaNet-D ({num_layers}, {num_filters})"
    return Subject(name, lambda sizes: _amoebanet(num_layers, num_filters, image, sizes))


@cache
def _transformer(num_blocks: int, sizes: tuple[int, ...]) -> Profile:
    with torch.device("meta"):
        model = transformer_lm(num_blocks)
        words = torch.zeros(1, LENGTH, dtype=torch.long)

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        return cross_entropy(logits.flatten(0, 1), target.flatten())

    return _counted(model, words, words, loss, sizes)


@cache
def _amoebanet(num_layers: int, num_filters: int, image: int, sizes: tuple[int, ...]) -> Profile:
    with torch.device("meta"):
        model = amoebanet_d(num_layers, num_filters, num_classes=NUM_CLASSES, image_size=image)
        images = torch.zeros(2, 3, image, image)
        classes = torch.zeros(2, dtype=torch.long)

    def loss(logits: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        return cross_entropy(logits[0], target) + 0.4 * cross_entropy(logits[1], target)

    return _counted(model, images, classes, loss, sizes)


def _counted(
    model: Any, inputs: Tensor, targets: Tensor, loss: Any, sizes: tuple[int, ...]
) -> Profile:
    profile = penstock.profile(
        model,
        inputs,
        loss=loss,
        targets=targets,
        microbatch_sizes=sizes,
        measure=False,
        optimizer=torch.optim.RMSprop,
        threads=1,
        torch_type=_KERNELS,
    )
    # TensorFlow's update of a weight is one kernel: it moves each tensor once each way
    in_one = tuple(replace(own, update_bytes=0) for own in profile.weights)
    return replace(profile, weights=in_one)


def deepened(profile: Profile, more: int) -> Profile:
    """Return the profile of a chain that has its third layer, one of several alike, so many times
    more; what comes behind is numbered on.
    """

    def longer(items: Sequence[Any]) -> tuple[Any, ...]:
        return (*items[:_AT], *(items[_AT],) * more, *items[_AT:])

    layers = (
        replace(layer, name=f"block{n - 1}") if layer.name.startswith("block") else layer
        for n, layer in enumerate(longer(profile.layers))
    )
    return replace(
        profile,
        layers=tuple(layers),
        weights=longer(profile.weights),
        spans=tuple((n, n + 1) for n in range(len(profile.layers) + more)),
        sizes=tuple(
            replace(each, kind_of=longer(each.kind_of), **_longer_chain(each, more))
            for each in profile.sizes
        ),
    )


def _longer_chain(at: AtSize, more: int) -> dict[str, Any]:
    """Return values and what is saved of them; value n + 1 is what layer n gives, 0 the input."""
    values, saved = [], []
    for layer in range(-1, len(at.kind_of) + more):
        like = layer if layer <= _AT else max(_AT, layer - more)
        value = at.values[like + 1]
        assert value.producer == like, "the model is a chain"
        to = tuple(consumer + layer - like for consumer in value.consumers)
        values.append(replace(value, producer=layer, consumers=to, storage=layer + 1))
        if layer >= 0:
            saved.append(tuple(place + layer - like for place in at.saved[like]))
    return {"values": tuple(values), "saved": tuple(saved)}


def without_head(profile: Profile) -> Profile:
    """Return the profile of a chain without its last two layers, and without a loss."""
    kept = len(profile.layers) - 2

    def shorter(at: AtSize) -> AtSize:
        *values, last = at.values[: kept + 1]
        return replace(
            at,
            kind_of=at.kind_of[:kept],
            values=(*values, replace(last, consumers=())),
            saved=at.saved[:kept],
            loss=None,
            target_bytes=0,
        )

    return replace(
        profile,
        layers=profile.layers[:kept],
        weights=profile.weights[:kept],
        spans=profile.spans[:kept],
        sizes=tuple(map(shorter, profile.sizes)),
    )


def forward_flops(profile: Profile) -> tuple[int, ...]:
    """Return the FLOPs of each layer's forward, of the first micro-batch size."""
    at = profile.sizes[0]
    return tuple(
        sum(x.flops * x.count for x in at.layer(n).operators if x.part is Part.FORWARD)
        for n in range(len(profile.layers))
    )
