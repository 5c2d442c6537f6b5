"""A user's request for sharding: a ready plan, and layouts of weights by name.

    {"plan": "megatron", "blocks.*.widen.weight": "S(0)", "memory_limit_bytes": 2**34}

A name is a pattern, as of files: * stands for anything, dots too.  The first pattern that matches
a weight counts.  A layout is a state for each axis, "S(0)·R"; a single state stands for all.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigError, check_count, shown

_STATE = r" *(?:I|R|S\(\d+\)) *"
_LAYOUT = re.compile(f"{_STATE}(?:·{_STATE})*")
_NOT_NAMES = ("plan", "memory_limit_bytes")


@dataclass(frozen=True, slots=True)
class ShardingRequest:
    """A user's request for sharding."""

    plan: str = "auto"
    """The ready plan."""
    weights: Mapping[str, str] = field(default_factory=dict, hash=False)
    """Layouts of weights at rest, by patterns of names."""
    memory_limit_bytes: int | None = None
    """Limit of a device's weights, gradients, optimizer state and activations."""

    def __post_init__(self) -> None:
        for pattern, layout in self.weights.items():
            if not isinstance(layout, str) or not _LAYOUT.fullmatch(layout):
                raise ConfigError(
                    f"sharding pins {pattern!r} to {layout!r}; a weight at rest is 'I' (whole), "
                    "'R' (whole, its gradient summed once a step) or 'S(d)' (slices of dimension "
                    "d) along each axis, such as 'S(0)' or 'S(0)·R'"
                )
        if self.memory_limit_bytes is not None:
            check_count("memory_limit_bytes", self.memory_limit_bytes)

    @classmethod
    def of(cls, given: "str | Mapping[str, Any] | ShardingRequest") -> "ShardingRequest":
        """Read a request that is the name of a ready plan, or a mapping as above.

        Raises:
            ConfigError: it is neither, or a layout is none.
        """
        if isinstance(given, ShardingRequest):
            return given
        if isinstance(given, str):
            return cls(given)
        if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
            raise ConfigError(
                f"sharding={shown(given)}; give the name of a ready plan, or a mapping from names "
                'of weights to layouts, such as {"plan": "auto", "blocks.*.widen.*": "S(0)"}'
            )
        weights = {name: _text(x) for name, x in given.items() if name not in _NOT_NAMES}
        others = {name: given[name] for name in _NOT_NAMES if name in given}
        return cls(weights=weights, **others)

    @property
    def gathers(self) -> bool:
        """True if weights are cut between steps, and gathered for each."""
        return self.plan.endswith("zero1")

    def check(self) -> None:
        """Refuse a ready plan that does not exist.

        Raises:
            ConfigError: names those that do.
        """
        from .named import ready_plan

        ready_plan(self.plan)

    @property
    def given(self) -> str | dict[str, Any]:
        """The request as users write it."""
        if self == ShardingRequest(self.plan):
            return self.plan
        limit = self.memory_limit_bytes
        limits = {} if limit is None else {"memory_limit_bytes": limit}
        return {"plan": self.plan, **self.weights, **limits}

    def __str__(self) -> str:
        limit = self.memory_limit_bytes
        weights = (f"{name}: {layout}" for name, layout in self.weights.items())
        limits = [] if limit is None else [f"at most {limit:,} bytes"]
        return ", ".join((str(self.plan), *weights, *limits))


def _text(layout: Any) -> Any:
    """Return a layout as text; users may give a state, or a list with one for each axis."""
    if isinstance(layout, list | tuple):
        return "·".join(str(_text(state)) for state in layout)
    return layout if isinstance(layout, str) else repr(layout)
