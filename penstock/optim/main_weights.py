"""Keep float32 main weights of low-precision parameters for an optimizer to update.

    parameter (bf16) ──► forward, backward ──► .grad (bf16, or fp32 by gradient_dtype=)
           ▲                                      │
           └── copy ── main weight (fp32) ◄── update by the wrapped optimizer

An update smaller than a bfloat16 step is lost in the parameter, and adds up in the main weight.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from penstock.errors import ConfigError, shown
from penstock.model.entries import version_of

MAIN = "main_weight"
"""The key of a parameter's main weight in the optimizer's state."""


class MainWeights(Optimizer):
    """Updates float32 main weights by another optimizer, and copies them to the parameters.

        optimizer = penstock.MainWeights(torch.optim.AdamW, pipe.parameters(), lr=3e-4)

    The state of a parameter holds its main weight and the wrapped optimizer's state, all in
    float32.  So checkpoints have both, and learning rate schedulers, clipping and loss scaling
    work as with the wrapped optimizer.  Parameters of at least 32 bits have no main weight.  A
    parameter that was changed in place since the last step, by a loaded file say, gets a new main
    weight where it differs.

    Args:
        make: the class of the optimizer, or a function that makes one.  It must treat each
            parameter by itself, and take one gradient per step.
        params: parameters, or groups of them, as torch's optimizers take them.
        options: the other arguments of `make`.

    Raises:
        ConfigError: `make` is no class or function, or makes no such optimizer.
    """

    def __init__(self, make: Callable[..., Optimizer], params: Any, **options: Any) -> None:
        if not callable(make):
            raise ConfigError(
                f"make={shown(make)}; give a class such as torch.optim.AdamW, and the arguments "
                "of the optimizer after it: MainWeights(torch.optim.AdamW, params, lr=3e-4)"
            )
        super().__init__(params, {})
        self._versions: dict[Tensor, int] = {}
        mains = self._mains()
        wrapped = make(_with_params(self.param_groups, mains), **options)
        if not isinstance(wrapped, Optimizer) or isinstance(wrapped, LBFGS):
            raise ConfigError(
                f"make gives {shown(wrapped)}; main weights need an optimizer that takes one "
                "gradient per step and treats each parameter by itself, as SGD and AdamW do"
            )
        self.defaults = wrapped.defaults
        self._keep(wrapped, mains)
        wrapped.param_groups, wrapped.state = [], defaultdict(dict)
        self._wrapped = wrapped

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_wrapped": self._wrapped, "_versions": {}}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the main weights by the gradients, and copy them to the parameters.

        Args:
            closure: computes the loss and the gradients, once, before the update.

        Returns:
            The result of `closure`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # 1. Give the gradients to the main weights, in their dtype.
        mains = self._mains()
        moved = {p: main for p, main in mains.items() if p.grad is not None}
        for parameter, main in moved.items():
            assert parameter.grad is not None
            main.grad = parameter.grad.to(main.dtype)
        # 2. Update them by a shallow copy: stages may update their groups at the same time.
        wrapped = object.__new__(type(self._wrapped))
        vars(wrapped).update(vars(self._wrapped))
        wrapped.param_groups = _with_params(self.param_groups, mains)
        wrapped.state = self._state_by_main(mains)
        try:
            wrapped.step()
        finally:
            for main in moved.values():
                main.grad = None
        # 3. Copy them to the parameters.
        self._keep(wrapped, mains)
        for parameter, main in moved.items():
            parameter.copy_(main)
            self._versions[parameter] = version_of(parameter)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load main weights and the wrapped optimizer's state, as torch's optimizers do."""
        groups = self.param_groups
        self.param_groups = _with_params(groups, self._mains())  # so torch keeps float32
        super().load_state_dict(state_dict)
        pairs = zip(_parameters(groups), _parameters(self.param_groups), strict=True)
        own = {main: parameter for parameter, main in pairs}
        self.param_groups = _with_params(self.param_groups, own)
        by_parameter = {own.get(key, key): state for key, state in self.state.items()}
        self.state = defaultdict(dict, by_parameter)
        self._versions = {}

    @torch.no_grad()
    def _mains(self) -> dict[Tensor, Tensor]:
        """Return the main weight of each low-precision parameter; make those that are missing."""
        mains = {}
        for parameter in _parameters(self.param_groups):
            if not parameter.is_floating_point() or parameter.element_size() >= 4:
                continue
            state, version = self.state[parameter], version_of(parameter)
            if MAIN not in state:
                state[MAIN] = parameter.detach().float()
            elif self._versions.get(parameter) != version:
                main = state[MAIN]
                is_same = main.to(parameter.dtype) == parameter
                main.copy_(torch.where(is_same, main, parameter.float()))
            self._versions[parameter] = version
            mains[parameter] = state[MAIN]
        return mains

    def _state_by_main(self, mains: Mapping[Tensor, Tensor]) -> defaultdict[Any, Any]:
        """Return the state as the wrapped optimizer has it: without main weights, by them."""
        held = ((p, self.state[p]) for p in _parameters(self.param_groups) if p in self.state)
        by_main = {
            mains.get(p, p): {key: value for key, value in state.items() if key != MAIN}
            for p, state in held
        }
        return defaultdict(dict, {main: state for main, state in by_main.items() if state})

    def _keep(self, wrapped: Optimizer, mains: Mapping[Tensor, Tensor]) -> None:
        """Take over the options and the state of the wrapped optimizer."""
        for group, theirs in zip(self.param_groups, wrapped.param_groups, strict=True):
            group.update({key: value for key, value in theirs.items() if key != "params"})
        for parameter in _parameters(self.param_groups):
            main = mains.get(parameter)
            state = wrapped.state.get(parameter if main is None else main)
            if main is not None:
                self.state[parameter] = {MAIN: main, **(state or {})}
            elif state:
                self.state[parameter] = state


def _parameters(groups: Iterable[Mapping[str, Any]]) -> list[Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def _with_params(
    groups: Iterable[Mapping[str, Any]], other: Mapping[Tensor, Tensor]
) -> list[dict[str, Any]]:
    """Return groups with the same options, and `other` parameters where there are any."""
    return [{**group, "params": [other.get(p, p) for p in group["params"]]} for group in groups]
