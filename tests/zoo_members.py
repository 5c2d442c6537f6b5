"""A small member of each family of the zoo, with what it is called with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.zoo import bottleneck_resnet, unet

ZooMember = Callable[[], tuple[nn.Module, Any]]
"""Gives a model, the same weights each time, and a batch of example inputs."""


def resnet_member() -> tuple[nn.Module, Any]:
    return bottleneck_resnet((1, 2), 4, num_classes=5), torch.randn(6, 3, 24, 17)


def wide_resnet_member() -> tuple[nn.Module, Any]:
    return bottleneck_resnet((1, 1, 1), 4, 2, num_classes=5), torch.randn(6, 3, 17, 24)


def unet_member() -> tuple[nn.Module, Any]:
    return unet(depth=3, width=4, out_channels=2, dropout=0.2), torch.randn(6, 3, 11, 14)


def unet_group_norm_member() -> tuple[nn.Module, Any]:
    return unet(depth=2, width=4, norm="group", dropout=0.2), torch.randn(6, 3, 8, 9)


def seeded(build: ZooMember) -> ZooMember:
    """Give a member whose weights and inputs are the same each time."""

    def member() -> tuple[nn.Module, Any]:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return build()

    return member


ZOO_MEMBERS: dict[str, ZooMember] = {
    "resnet": seeded(resnet_member),
    "unet": seeded(unet_member),
    "unet, group norm": seeded(unet_group_norm_member),
    "wide resnet": seeded(wide_resnet_member),
}
