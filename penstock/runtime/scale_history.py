"""Warn of float8 modules whose scales depend on the micro-batches that ran before."""

import warnings
from collections.abc import Iterable
from typing import Any

from torch import nn

from penstock.errors import StatisticsWarning

_HISTORY = "amax_history"


def warn_of_scale_history(modules: Iterable[nn.Module]) -> None:
    """Warn once if modules keep a history of largest values, as delayed scaling does.

    Known are tensors named "...amax_history...", and the `fp8_meta` of TransformerEngine, unless
    its recipe is one that scales by the tensor at hand.
    """
    everyone = dict.fromkeys(m for root in modules for m in root.modules())
    kinds = {type(module).__name__ for module in everyone if _keeps_history(module)}
    if kinds:
        warnings.warn(
            f"float8 scales of {', '.join(sorted(kinds))} may come from a history of earlier "
            "micro-batches (delayed scaling), so the bits depend on the number of stages and the "
            "schedule. Use a recipe that scales by the tensor at hand: torchao's Float8Linear, or "
            "Float8CurrentScaling or MXFP8BlockScaling of TransformerEngine",
            StatisticsWarning,
            stacklevel=5,
        )


def _keeps_history(module: nn.Module) -> bool:
    attributes = vars(module)
    if any(_HISTORY in name for name in (*attributes, *dict(module.named_buffers(recurse=False)))):
        return True
    meta: Any = attributes.get("fp8_meta")
    if not isinstance(meta, dict):
        return False
    recipe = meta.get("recipe")  # there from the first forward on
    return recipe is None or f"{_HISTORY}_len" in dir(recipe)
