"""Models from the papers, as plain nn.Modules that know nothing of pipelines.

A name is resolved at its first use, which imports its module.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .amoebanet import amoebanet_b as amoebanet_b
    from .amoebanet import amoebanet_d as amoebanet_d
    from .drop_path import DropPath as DropPath
    from .drop_path import set_drop_path_progress as set_drop_path_progress
    from .gpt_family import GPT_SIZES as GPT_SIZES
    from .gpt_family import gpt as gpt
    from .gpt_family import transformer_lm as transformer_lm
    from .resnet import residual_network as residual_network
    from .translation.beam import Translations as Translations
    from .translation.beam import beam_search as beam_search
    from .translation.model import Tied as Tied
    from .translation.model import TranslationTransformer as TranslationTransformer
    from .translation.model import shift_right as shift_right
    from .translation.model import smoothed_cross_entropy as smoothed_cross_entropy
    from .translation.model import translation_transformer as translation_transformer

_NAMES = {
    "amoebanet": ("amoebanet_b", "amoebanet_d"),
    "drop_path": ("DropPath", "set_drop_path_progress"),
    "gpt_family": ("GPT_SIZES", "gpt", "transformer_lm"),
    "resnet": ("residual_network",),
    "translation.beam": ("Translations", "beam_search"),
    "translation.model": (
        "Tied",
        "TranslationTransformer",
        "shift_right",
        "smoothed_cross_entropy",
        "translation_transformer",
    ),
}
"""The public names of each module."""
_HOME = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'penstock_recipes.zoo' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
