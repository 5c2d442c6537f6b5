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
    from .gshard import GSHARD_SIZES as GSHARD_SIZES
    from .gshard import gshard_moe as gshard_moe
    from .layer_table import Summary as Summary
    from .layer_table import summary as summary
    from .resnet import WIDE_RESNET_SIZES as WIDE_RESNET_SIZES
    from .resnet import bottleneck_resnet as bottleneck_resnet
    from .resnet import residual_network as residual_network
    from .resnet import resnet50 as resnet50
    from .resnet import resnet101 as resnet101
    from .resnet import wide_resnet as wide_resnet
    from .translation.beam import Translations as Translations
    from .translation.beam import beam_search as beam_search
    from .translation.model import Tied as Tied
    from .translation.model import TranslationTransformer as TranslationTransformer
    from .translation.model import shift_right as shift_right
    from .translation.model import smoothed_cross_entropy as smoothed_cross_entropy
    from .translation.model import translation_transformer as translation_transformer
    from .u_net import unet as unet

_HOME = {
    "DropPath": "penstock.zoo.drop_path",
    "GPT_SIZES": "penstock.zoo.gpt_family",
    "GSHARD_SIZES": "penstock.zoo.gshard",
    "Summary": "penstock.zoo.layer_table",
    "Tied": "penstock.zoo.translation.model",
    "TranslationTransformer": "penstock.zoo.translation.model",
    "Translations": "penstock.zoo.translation.beam",
    "WIDE_RESNET_SIZES": "penstock.zoo.resnet",
    "amoebanet_b": "penstock.zoo.amoebanet",
    "amoebanet_d": "penstock.zoo.amoebanet",
    "beam_search": "penstock.zoo.translation.beam",
    "bottleneck_resnet": "penstock.zoo.resnet",
    "gpt": "penstock.zoo.gpt_family",
    "gshard_moe": "penstock.zoo.gshard",
    "residual_network": "penstock.zoo.resnet",
    "resnet101": "penstock.zoo.resnet",
    "resnet50": "penstock.zoo.resnet",
    "set_drop_path_progress": "penstock.zoo.drop_path",
    "shift_right": "penstock.zoo.translation.model",
    "smoothed_cross_entropy": "penstock.zoo.translation.model",
    "summary": "penstock.zoo.layer_table",
    "transformer_lm": "penstock.zoo.gpt_family",
    "translation_transformer": "penstock.zoo.translation.model",
    "unet": "penstock.zoo.u_net",
    "wide_resnet": "penstock.zoo.resnet",
}

__all__ = [
    "GPT_SIZES",
    "GSHARD_SIZES",
    "WIDE_RESNET_SIZES",
    "DropPath",
    "Summary",
    "Tied",
    "TranslationTransformer",
    "Translations",
    "amoebanet_b",
    "amoebanet_d",
    "beam_search",
    "bottleneck_resnet",
    "gpt",
    "gshard_moe",
    "residual_network",
    "resnet50",
    "resnet101",
    "set_drop_path_progress",
    "shift_right",
    "smoothed_cross_entropy",
    "summary",
    "transformer_lm",
    "translation_transformer",
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
