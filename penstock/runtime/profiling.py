"""Profile a model: count the operators of its layers, and measure their time and memory."""

import math
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from penstock.costs.counting.count import count_layers, record_graph, samples_in
from penstock.costs.counting.graph import Operators
from penstock.costs.counting.layer_weights import MakeOptimizer, layer_weights
from penstock.costs.measuring.measure import (
    THOROUGH,
    How,
    Objective,
    repeats_within,
    with_seconds,
)
from penstock.costs.profile import Profile
from penstock.costs.records import AtSize
from penstock.errors import BatchError, ConfigError, check_count, shown
from penstock.model.batch import of_size
from penstock.model.capture.capture import resolve_layers
from penstock.model.entries import Entry
from penstock.model.layer_list import Layer
from penstock.model.layers import Layers
from penstock.model.stage_plan import Step
from penstock.planner.shared_cores import num_cores
from penstock.trace.progress import saying
from penstock.trace.units import count_text

from .batch_norm import batch_norms
from .gradient_dtype import check_gradient_dtype, name_of_dtype
from .planning import StageCalls, facts_of
from .stage.split_backward import SplitBackward, divide, split
from .unsplit import left_bytes

CPU_CORE = "core"
"""The name of a CPU core as a device in profiles and calibrations."""
_RUN_PER_STEP = 3
"""Seconds of a run that measures layers, over their forwards and backwards."""


def profile(  # noqa: PLR0913 - the front door: each a keyword with a default
    layers: "nn.Module | Sequence[nn.Module | Layer] | Layers",
    example_inputs: Any,
    *,
    loss: Callable[[Any, Any], Tensor] | None = None,
    targets: Any = None,
    microbatch_sizes: Sequence[int] | None = None,
    measure: bool = True,
    compile: bool = False,
    budget_s: float | None = None,
    busy: bool = False,
    optimizer: MakeOptimizer = torch.optim.AdamW,
    gradient_dtype: torch.dtype | str | None = None,
    threads: int | None = None,
    torch_type: str | None = None,
    name: str | None = None,
) -> Profile:
    """Return the cost of each layer of a model: measured here, or only counted.

    The call restores the model: weights, gradients, buffers and random numbers.

    Args:
        layers: as `Pipeline` takes them; on the meta device, if they are only counted.
        example_inputs: a batch; micro-batches are its first samples, or all of them several times.
        loss: (output, target) -> scalar tensor, to be part of the profile.
        targets: of the batch, for the loss.
        microbatch_sizes: numbers of samples; default: those of the batch, as one.
        measure: True runs the layers on their devices and takes times; False only counts their
            operators, on tensors without values.
        compile: count layers that `Pipeline(compile=True)` compiles, with `measure=False`: a chain
            of elementwise operators, reductions and norms is one kernel.  Saved bytes count as
            without a compiler.
        budget_s: seconds of measuring, about, with fewer repeats; larger micro-batches than it
            allows are left out.  Default: up to a minute for each size.
        busy: measure a second time, while all other cores of the host do the same.
        optimizer: makes the optimizer of a list of parameters, whose state is counted; for main
            weights `lambda params: penstock.MainWeights(torch.optim.AdamW, params)`.
        gradient_dtype: as `Pipeline` takes it; gradients of this dtype are counted.
        threads: intra-op threads of a stage on the CPU; default: torch's.
        torch_type: the type of device whose kernels are counted; default: that of the layers,
            "cuda" if they are only counted.
        name: of the model; default: that of its class.

    Raises:
        ConfigError: an argument cannot work, a layer to measure has no values, or a layer needs
            values to be counted.
        BatchError: the inputs are no batch.
    """
    # 1. Resolve the layers, their device, and the settings of the measurement.
    _check_given(example_inputs, optimizer, microbatch_sizes or (), threads)
    gradients = name_of_dtype(gradient_dtype)
    check_gradient_dtype(gradients)
    has_values = not any(t.is_meta for t in _tensors(layers))
    resolved = resolve_layers(layers, example_inputs)
    if measure and compile:
        raise ConfigError(
            "compile=True counts the kernels of compiled layers, and measure=True runs the layers "
            "as they are. Give measure=False to count, or measure layers that are compiled "
            "(layer.compile())"
        )
    if measure and not has_values:
        raise ConfigError(
            "the layers are on the meta device, without values, so they cannot be measured; give "
            "measure=False to count what they do"
        )
    device = next((t.device for t in _tensors(resolved)), torch.device("cpu"))
    kernels = torch_type or (device.type if measure else "cuda")
    own_threads = threads or torch.get_num_threads()
    sizes = sorted(set(microbatch_sizes or [samples_in(example_inputs)]))
    how = How(
        threads=own_threads,
        call=StageCalls,
        divide=divided_backward,
        busy=max(0, num_cores() // own_threads - 1) if busy else 0,
        repeats=THOROUGH if budget_s is None else repeats_within(budget_s / len(sizes)),
    )
    end_s = time.perf_counter() + (math.inf if budget_s is None else budget_s)

    # 2. Count and measure micro-batches of each size.
    weights = layer_weights(resolved, optimizer, gradients)
    norms = batch_norms([step.module for step in resolved])
    costs: list[AtSize] = []
    for size in sizes:
        if measure and costs and time.perf_counter() + _run_s(costs[-1], size) > end_s:
            break
        inputs, target = of_samples(example_inputs, size), of_samples(targets, size)
        counted = count_layers(
            resolved,
            inputs,
            microbatch_size=size,
            loss=loss,
            targets=target,
            left=left_bytes,
            own=[s for m in norms for s in (m.running_mean, m.running_var) if s is not None],
            torch_type=kernels,
            compile=compile,
        )
        if loss is None:
            counted = replace(counted, loss=None)
        if measure:
            objective = None if loss is None else Objective(loss, target)
            with saying(
                f"measuring {count_text(len(resolved), 'layer')}, micro-batches of {size}"
            ):
                counted = with_seconds(counted, resolved, inputs, how, objective)
        costs.append(counted)

    # 3. Name the model and its device, and describe the environment.
    model = layers.model if isinstance(layers, Layers) else layers
    return Profile(
        name=name or (type(model).__name__ if isinstance(model, nn.Module) else "model"),
        layers=facts_of(resolved),
        spans=resolved.spans,
        weights=tuple(
            replace(own, num_norms=len(batch_norms([step.module])))
            for step, own in zip(resolved, weights, strict=True)
        ),
        sizes=tuple(costs),
        measured_on=device_name(device) if measure else None,
        threads=own_threads,
        environment=(
            ("date", str(date.today())),
            ("machine", platform.node()),
            ("processor", platform.machine()),
            ("python", platform.python_version()),
            ("torch", str(torch.__version__)),
        ),
        operators=Operators(
            tuple(step.path for step in resolved),
            cache(
                lambda size: record_graph(
                    resolved,
                    of_samples(example_inputs, size),
                    loss=loss,
                    targets=of_samples(targets, size),
                    compile=compile,
                )
            ),
        ),
    )


def device_name(device: torch.device) -> str:
    """Return the name of a device in profiles and calibrations."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else CPU_CORE


def _check_given(inputs: Any, optimizer: Any, sizes: Sequence[int], threads: int | None) -> None:
    if inputs is None:
        raise BatchError("example_inputs=None; give a batch, as the model is given in training")
    if not callable(optimizer):
        raise ConfigError(
            f"optimizer={shown(optimizer)}; give a function that makes one of a list of "
            "parameters, such as torch.optim.AdamW: what it keeps for them is counted"
        )
    for size in sizes:
        check_count("microbatch_sizes", size)
    if threads is not None:
        check_count("threads", threads)


def _run_s(known: AtSize, size: int) -> float:
    """Return the seconds of a run that measures `size` samples, by those of a smaller size."""
    layers = [known.seconds(n) for n in range(len(known.kind_of))]
    both_s = sum(layer.forward_s + layer.backward_s for layer in layers)
    return _RUN_PER_STEP * both_s * size / known.microbatch_size


def divided_backward(roots: Sequence[Tensor], entries: Sequence[Entry]) -> SplitBackward | None:
    """Split a backward as a stage does."""
    differentiable = [entry for entry in entries if entry.node is not None]
    return split(divide(roots, {entry.node for entry in differentiable}), differentiable)


def _tensors(layers: Any) -> list[Tensor]:
    """Return the parameters and buffers of layers, or of modules that become layers."""
    if isinstance(layers, nn.Module):
        layers = [layers]
    modules = [x.module if isinstance(x, Layer | Step) else x for x in layers]
    return [
        tensor
        for module in modules
        if isinstance(module, nn.Module)
        for tensor in (*module.parameters(), *module.buffers())
    ]


def of_samples(value: Any, size: int) -> Any:
    """Return a batch of `size` samples, repeated if there are fewer."""
    if value is None or samples_in(value) == size:
        return value
    return of_size(value, size, "example inputs")
