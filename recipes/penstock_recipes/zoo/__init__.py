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

_HOME = {
    "DropPath": "penstock_recipes.zoo.drop_path",
    "GPT_SIZES": "penstock_recipes.zoo.gpt_family",
    "Tied": "penstock_recipes.zoo.translation.model",
    "TranslationTransformer": "penstock_recipes.zoo.translation.model",
    "Translations": "penstock_recipes.zoo.translation.beam",
    "amoebanet_b": "penstock_recipes.zoo.amoebanet",
    "amoebanet_d": "penstock_recipes.zoo.amoebanet",
    "beam_search": "penstock_recipes.zoo.translation.beam",
    "gpt": "penstock_recipes.zoo.gpt_family",
    "residual_network": "penstock_recipes.zoo.resnet",
    "set_drop_path_progress": "penstock_recipes.zoo.drop_path",
    "shift_right": "penstock_recipes.zoo.translation.model",
    "smoothed_cross_entropy": "penstock_recipes.zoo.translation.model",
    "transformer_lm": "penstock_recipes.zoo.gpt_family",
    "translation_transformer": "penstock_recipes.zoo.translation.model",
}

__all__ = [
    "GPT_SIZES",
    "DropPath",
    "Tied",
    "TranslationTransformer",
    "Translations",
    "amoebanet_b",
    "amoebanet_d",
    "beam_search",
    "gpt",
    "residual_network",
    "set_drop_path_progress",
    "shift_right",
    "smoothed_cross_entropy",
    "transformer_lm",
    "translation_transformer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'penstock.zoo' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
