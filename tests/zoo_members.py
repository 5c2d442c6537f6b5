"""Small members of every family of the zoo, with all that is random or hard in them switched on.

Whoever adds one here buys the laws of test_zoo_equality.py.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.zoo import amoebanet_b, amoebanet_d, bottleneck_resnet, residual_network, unet
from penstock.zoo.u_net import UNet

BATCH = 9
"""Samples of an example, so that four micro-batches are uneven, and none has one sample only."""

Member = tuple[nn.Module, Any]
"""A model, and what it is called with: `BATCH` samples along dimension 0 of each tensor."""


def _residual() -> Member:
    return residual_network(4, 4, dropout=0.2), torch.randn(BATCH, 1, 8, 8)


def _amoebanet_d() -> Member:
    model = amoebanet_d(3, 16, num_classes=5, image_size=32, drop_path=0.3)
    return model, torch.randn(BATCH, 3, 32, 32)


def _amoebanet_b() -> Member:
    model = amoebanet_b(
        4, 16, num_classes=5, in_channels=1, image_size=11, drop_path=0.3, small=True
    )
    return model, torch.randn(BATCH, 1, 11, 11)


def _resnet() -> Member:
    return bottleneck_resnet((1, 2), 4, num_classes=5), torch.randn(BATCH, 3, 24, 17)


def _wide_resnet() -> Member:
    return bottleneck_resnet((1, 1, 1), 4, 2, num_classes=5), torch.randn(BATCH, 3, 17, 24)


def _unet() -> Member:
    return unet(depth=3, width=4, out_channels=2, dropout=0.2), torch.randn(BATCH, 3, 11, 14)


def _unet_group_norm() -> Member:
    model = unet(depth=2, width=4, norm="group", dropout=0.2)
    return model, torch.randn(BATCH, 3, 8, 9)


ZOO_MEMBERS: dict[str, Callable[[], Member]] = {
    "residual_network": _residual,
    "amoebanet_d": _amoebanet_d,
    "amoebanet_b": _amoebanet_b,
    "resnet": _resnet,
    "wide_resnet": _wide_resnet,
    "unet": _unet,
    "unet, group norm": _unet_group_norm,
}
"""Name -> what makes the member; it draws weights and inputs from torch's global generator."""

BLOCKS: dict[type[nn.Module], list[str]] = {UNet: ["encoder.*", "bottom", "decoder.*", "head"]}
"""Blocks by which some are cut here: those that capture finds leave dropout between them, whose
numbers plain torch cannot draw alike.
"""
