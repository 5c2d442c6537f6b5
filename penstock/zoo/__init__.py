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
    from .residual import residual_network as residual_network

_HOME = {
    "DropPath": "penstock.zoo.drop_path",
    "amoebanet_b": "penstock.zoo.amoebanet",
    "amoebanet_d": "penstock.zoo.amoebanet",
    "residual_network": "penstock.zoo.residual",
    "set_drop_path_progress": "penstock.zoo.drop_path",
}

__all__ = [
    "DropPath",
    "amoebanet_b",
    "amoebanet_d",
    "residual_network",
    "set_drop_path_progress",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'penstock.zoo' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
