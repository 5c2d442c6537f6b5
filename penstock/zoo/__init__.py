"""Models from the papers, as plain nn.Modules that know nothing of pipelines.

Names are resolved when first used: a model's file is imported when it is wanted.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .amoebanet import amoebanet_b as amoebanet_b
    from .amoebanet import amoebanet_d as amoebanet_d
    from .drop_path import DropPath as DropPath
    from .drop_path import set_drop_path_progress as set_drop_path_progress
    from .layer_table import Summary as Summary
    from .layer_table import summary as summary
    from .residual import residual_network as residual_network
    from .resnet import WIDE_RESNET_SIZES as WIDE_RESNET_SIZES
    from .resnet import bottleneck_resnet as bottleneck_resnet
    from .resnet import resnet50 as resnet50
    from .resnet import resnet101 as resnet101
    from .resnet import wide_resnet as wide_resnet
    from .u_net import unet as unet

_HOME = {
    "DropPath": "penstock.zoo.drop_path",
    "Summary": "penstock.zoo.layer_table",
    "WIDE_RESNET_SIZES": "penstock.zoo.resnet",
    "amoebanet_b": "penstock.zoo.amoebanet",
    "amoebanet_d": "penstock.zoo.amoebanet",
    "bottleneck_resnet": "penstock.zoo.resnet",
    "residual_network": "penstock.zoo.residual",
    "resnet101": "penstock.zoo.resnet",
    "resnet50": "penstock.zoo.resnet",
    "set_drop_path_progress": "penstock.zoo.drop_path",
    "summary": "penstock.zoo.layer_table",
    "unet": "penstock.zoo.u_net",
    "wide_resnet": "penstock.zoo.resnet",
}

__all__ = [
    "WIDE_RESNET_SIZES",
    "DropPath",
    "Summary",
    "amoebanet_b",
    "amoebanet_d",
    "bottleneck_resnet",
    "residual_network",
    "resnet50",
    "resnet101",
    "set_drop_path_progress",
    "summary",
    "unet",
    "wide_resnet",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'penstock.zoo' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
