"""Compile the layers of a pipeline in place: one compiled function for each kind of layer.

torch keeps what it compiles beside the code of the outermost function, eight versions at most,
and runs the others uncompiled.  So layers of one kind share a function:

    Block 0, Block 1, ... Block 23  ──►  one function, compiled once for training
    Head                            ──►  another one
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import nn

from penstock.errors import ConfigError, shown
from penstock.model.layers import Layers
from penstock.model.stage_plan import stage_of_layers
from penstock.planner.plan import Plan
from penstock.torch_private import COMPILED_CALL, call_uncompiled, uncompiled

Compile = bool | Mapping[str, Any]
"""False, True, or options of torch.compile by name."""

_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune", "cudagraphs")
"""Modes and backends that overwrite a call's results in the next call."""


def _options(compile: Compile, plan: Plan) -> dict[str, Any]:
    """Return the options of torch.compile; none if layers are not compiled.

    Raises:
        ConfigError: the options are no mapping, or cannot keep the pipeline's bits.
    """
    if compile is False:
        return {}
    if compile is not True and not isinstance(compile, Mapping):
        raise ConfigError(
            f"compile={shown(compile)}; give True, or options of torch.compile in a dictionary, "
            'such as {"mode": "max-autotune-no-cudagraphs"}'
        )
    if plan.sharding is not None:
        raise ConfigError(
            "compile= cannot go with sharding=: the operators of a compiled layer are not seen, "
            "and so not divided; leave one of them out"
        )
    options = {"dynamic": False, **({} if compile is True else compile)}
    if options["dynamic"] is None:
        raise ConfigError(
            "compile= with dynamic=None lets the order of calls choose the compiled code of a "
            "shape, and stages have another order than the unsplit model; give dynamic=False, "
            "the default, which compiles each shape, or dynamic=True"
        )
    graphs = [key for key in ("mode", "backend") if options.get(key) in _WITH_CUDA_GRAPHS]
    if graphs or (options.get("options") or {}).get("triton.cudagraphs"):
        what = f"{graphs[0]}={options[graphs[0]]!r}" if graphs else "triton.cudagraphs"
        raise ConfigError(
            f"compile= with {what} runs CUDA graphs, which overwrite the activations of a "
            'micro-batch in the next one; use mode="max-autotune-no-cudagraphs" or leave it out'
        )
    return options


def compile_layers(layers: Layers, compile: Compile, plan: Plan) -> list[tuple[str, Any]]:
    """Let each layer run compiled from its next call on, also outside the pipeline.

    Nothing is compiled yet.  Names of parameters stay; copies and pickles of a layer are not
    compiled.  A layer that `torch.compile` returned stays as it is, and so does one that shares a
    parameter with another layer: torch would compile it for each micro-batch.

    Args:
        layers: the layers; each module is compiled once.
        compile: False does nothing; True, or keyword arguments of torch.compile.
        plan: its placement tells the device of each layer: a kind is compiled per device.

    Returns:
        The options as all processes write them: a function by its name.

    Raises:
        ConfigError: the options cannot work here, or torch.compile refuses them.
    """
    options = _options(compile, plan)
    if not options:
        return []
    modules = {step.module for step in layers}
    users = Counter(p for module in modules for p in module.parameters())
    functions: dict[Any, Callable[..., Any]] = {}
    for step, stage in zip(layers, stage_of_layers(plan.partition), strict=True):
        module = step.module
        is_tied = any(users[p] > 1 for p in module.parameters())  # lent anew for each micro-batch
        if is_tied or isinstance(uncompiled(module), nn.Module):
            continue
        kind = type(module), str(module), plan.placement.devices[stage]
        if kind not in functions:
            functions[kind] = _compiled(type(module).__name__, options)
        setattr(module, COMPILED_CALL, partial(functions[kind], module))
    return sorted((name, getattr(v, "__qualname__", v)) for name, v in options.items())


def _compiled(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a compiled call of a module, with a code object of its own."""
    code = call_uncompiled.__code__.replace(co_name=f"{name}_call")
    call = FunctionType(code, call_uncompiled.__globals__, code.co_name)
    try:
        return torch.compile(call, **options)
    except Exception as error:
        raise ConfigError(f"compile={shown(dict(options))}: torch.compile says: {error}") from None
