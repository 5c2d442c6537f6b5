"""Networks of published papers, as plain modules that know nothing of pipelines.

Names are resolved when first used, so that one network does not load the others.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    "Summary": "penstock.zoo.layer_table",
    "WIDE_RESNET_SIZES": "penstock.zoo.resnet",
    "bottleneck_resnet": "penstock.zoo.resnet",
    "residual_network": "penstock.zoo.residual",
    "resnet101": "penstock.zoo.resnet",
    "resnet50": "penstock.zoo.resnet",
    "summary": "penstock.zoo.layer_table",
    "unet": "penstock.zoo.u_net",
    "wide_resnet": "penstock.zoo.resnet",
}

__all__ = [
    "WIDE_RESNET_SIZES",
    "Summary",
    "bottleneck_resnet",
    "residual_network",
    "resnet50",
    "resnet101",
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
