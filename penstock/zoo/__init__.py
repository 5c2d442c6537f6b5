"""Models to train: plain modules that know nothing of pipelines.

Public names are resolved when first used.  Modules bear other names than what they hold, so that
`penstock.zoo.gpt` is the function whatever was imported before.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .gpt_family import GPT_SIZES as GPT_SIZES
    from .gpt_family import gpt as gpt
    from .gshard import GSHARD_SIZES as GSHARD_SIZES
    from .gshard import gshard_moe as gshard_moe
    from .scaling_model import transformer_lm as transformer_lm
    from .translation.beam import Translations as Translations
    from .translation.beam import beam_search as beam_search
    from .translation.loss import shift_right as shift_right
    from .translation.loss import smoothed_cross_entropy as smoothed_cross_entropy
    from .translation.model import Tied as Tied
    from .translation.model import TranslationTransformer as TranslationTransformer
    from .translation.model import translation_transformer as translation_transformer

_HOME = {
    "GPT_SIZES": "penstock.zoo.gpt_family",
    "GSHARD_SIZES": "penstock.zoo.gshard",
    "Tied": "penstock.zoo.translation.model",
    "TranslationTransformer": "penstock.zoo.translation.model",
    "Translations": "penstock.zoo.translation.beam",
    "beam_search": "penstock.zoo.translation.beam",
    "gpt": "penstock.zoo.gpt_family",
    "gshard_moe": "penstock.zoo.gshard",
    "shift_right": "penstock.zoo.translation.loss",
    "smoothed_cross_entropy": "penstock.zoo.translation.loss",
    "transformer_lm": "penstock.zoo.scaling_model",
    "translation_transformer": "penstock.zoo.translation.model",
}

__all__ = [
    "GPT_SIZES",
    "GSHARD_SIZES",
    "Tied",
    "TranslationTransformer",
    "Translations",
    "beam_search",
    "gpt",
    "gshard_moe",
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
