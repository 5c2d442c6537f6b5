"""A device of its own for each rank, whatever cores there are: layers wait and do not compute.

    forward: waits F       its input's gradient: waits I       its weight's gradient: waits W

Waiting ranks do not take time from each other, so that four of them can be measured on two cores.
What is measured is all else: the schedule, the executor and the messages.
"""

import time
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from penstock.schedules import one_f_one_b
from penstock.schedules.costs import Costs
from penstock.simulator import simulate

WIDTH = 4


@dataclass(slots=True)
class Device:
    """Waits, and counts how often it did for what."""

    forward_s: float
    input_s: float
    weight_s: float
    times: Counter[str] = field(default_factory=Counter)

    def forward(self) -> None:
        """Wait for a forward."""
        self._wait("F", self.forward_s)

    def input_backward(self, _: Tensor) -> None:
        """Wait for the gradient of an input."""
        self._wait("I", self.input_s)

    def weight_backward(self, _: Tensor) -> None:
        """Wait for the gradient of a weight."""
        self._wait("W", self.weight_s)

    def _wait(self, what: str, seconds: float) -> None:
        self.times[what] += 1
        time.sleep(seconds)


class Emulated(nn.Module):
    """A small linear layer that takes as long as its device says: (B, WIDTH) -> the same."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.linear, self._device = nn.Linear(WIDTH, WIDTH, bias=False), device
        self.linear.weight.register_hook(device.weight_backward)

    def forward(self, x: Tensor) -> Tensor:
        """Wait; the backward waits too, once for the input and once for the weight."""
        self._device.forward()
        if x.requires_grad:
            x = x.view_as(x)
            x.register_hook(self._device.input_backward)
        y: Tensor = self.linear(x)
        return y


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What all contestants do: layers on `num_ranks` ranks, each with a device of its own.

    A layer takes `layer_s` for a forward, `inputs` times that for an input's gradient, and as much
    times its entry of `weights` for a weight's.
    """

    num_ranks: int
    layer_s: float = 2e-3
    inputs: float = 1.0
    weights: tuple[float, ...] = (1.0,) * 8

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.weights)

    def model(self) -> nn.Sequential:
        """Build the model; equal at every call."""
        one_s = self.layer_s
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            devices = (Device(one_s, self.inputs * one_s, w * one_s) for w in self.weights)
            return nn.Sequential(*map(Emulated, devices))

    def data(self, num_microbatches: int) -> tuple[Tensor, Tensor]:
        """Draw inputs and targets, two samples for each micro-batch; equal at every call."""
        generator = torch.Generator().manual_seed(1)
        inputs, targets = torch.randn((2, 2 * num_microbatches, WIDTH), generator=generator)
        return inputs, targets

    def step_s(self, num_microbatches: int) -> float:
        """Say what a step of 1F1B takes, if nothing but the devices takes time."""
        schedule = one_f_one_b(self.num_ranks, num_microbatches)
        return float(simulate(schedule, self.costs(self.num_ranks)).step_s)

    def costs(self, num_stages: int) -> Costs:
        """Say what each stage takes; the first layer's input has no gradient."""
        size = self.num_layers // num_stages
        input_s = self.inputs * self.layer_s
        of_inputs = tuple((size - (stage == 0)) * input_s for stage in range(num_stages))
        of_weights = tuple(
            sum(self.weights[stage * size : (stage + 1) * size]) * self.layer_s
            for stage in range(num_stages)
        )
        return Costs(
            forward_s=size * self.layer_s,
            backward_s=tuple(map(sum, zip(of_inputs, of_weights, strict=True))),
            recompute_s=size * self.layer_s,
            backward_input_s=of_inputs,
            backward_weight_s=of_weights,
        )
