"""An optimizer's state by parameter name, so that it does not depend on how the model is cut."""

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CheckpointError

Json = dict[str, Any]


def parameter_names(module: nn.Module) -> dict[int, str]:
    """Map the id of every parameter to its name; a shared one goes by its first."""
    return {id(parameter): name for name, parameter in module.named_parameters()}


def pack_optimizer(
    optimizer: torch.optim.Optimizer, module: nn.Module
) -> tuple[dict[str, Tensor], Json]:
    """Split an optimizer's state into tensors by "<parameter name>.<state key>" and JSON values.

    The state key follows the last dot; a dot in the key itself is written as %2E.

    Raises:
        CheckpointError: a parameter is not the module's, or a value is neither tensor nor JSON.
    """
    names = parameter_names(module)
    groups = [
        {"parameters": _group_names(group, names), "options": _options(group)}
        for group in optimizer.param_groups
    ]
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    states = ((names[id(p)], state) for p, state in optimizer.state.items() if id(p) in names)
    for name, state in states:  # the stand-in for parameters has no name, and no state
        for key, value in state.items():
            target = tensors if isinstance(value, Tensor) else values
            target[f"{name}.{_escaped(str(key))}"] = value
    return tensors, {"kind": type(optimizer).__name__, "groups": groups, "values": values}


def merge_optimizers(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge all processes' optimizers into one; a CheckpointError if they are not alike."""
    first = parts[0]
    for rank, part in enumerate(parts):
        same = part["kind"] == first["kind"] and len(part["groups"]) == len(first["groups"])
        if not same:
            raise CheckpointError(
                f"the optimizer of rank {rank} is {part['kind']} with {len(part['groups'])} "
                f"parameter groups, that of rank 0 {first['kind']} with {len(first['groups'])}; "
                "make the same one on every rank"
            )
    groups = [
        {
            "parameters": [name for part in parts for name in part["groups"][n]["parameters"]],
            "options": first["groups"][n]["options"],
        }
        for n in range(len(first["groups"]))
    ]
    values = {name: value for part in parts for name, value in part["values"].items()}
    return {"kind": first["kind"], "groups": groups, "values": values}


def select(
    optimizer: torch.optim.Optimizer, module: nn.Module, facts: Json, keys: Iterable[str]
) -> tuple[Json, set[str]]:
    """Return the facts of this process's parameters, and the keys of the state held here."""
    names = parameter_names(module)
    names_here, groups = {*names.values()}, optimizer.param_groups
    held = {name for group in groups for name in _group_names(group, names)}
    facts = {
        **facts,
        "groups": [
            {**group, "parameters": [name for name in group["parameters"] if name in names_here]}
            for group in facts["groups"]
        ],
        "values": {k: v for k, v in facts["values"].items() if k.rpartition(".")[0] in names_here},
    }
    return facts, {key for key in keys if key.rpartition(".")[0] in held}


def check_optimizer(
    optimizer: torch.optim.Optimizer, module: nn.Module, facts: Json, tensors: Mapping[str, Tensor]
) -> list[str]:
    """List the faults that keep a saved state from being loaded; empty if there are none."""
    kind = type(optimizer).__name__
    if facts["kind"] != kind:
        return [f"the optimizer is {kind}, the saved one {facts['kind']}"]
    names = parameter_names(module)
    here = [set(_group_names(group, names)) for group in optimizer.param_groups]
    there = [set(group["parameters"]) for group in facts["groups"]]
    if len(here) != len(there):
        return [f"the optimizer has {len(here)} parameter groups, the saved one {len(there)}"]
    faults = [
        f"parameter group {n} lacks {_some(there[n] - here[n])} and has beyond the saved one "
        f"{_some(here[n] - there[n])}"
        for n in range(len(here))
        if here[n] != there[n]
    ]
    known = {name for group in here for name in group}
    keys = (*tensors, *facts["values"])
    strange = [key for key in keys if key.rpartition(".")[0] not in known]
    return faults + [f"{key} belongs to no parameter of the optimizer" for key in strange]


def unpack_optimizer(
    optimizer: torch.optim.Optimizer, module: nn.Module, facts: Json, tensors: Mapping[str, Tensor]
) -> None:
    """Load a state that passed `check_optimizer`."""
    names = parameter_names(module)
    by_parameter: dict[str, dict[str, Any]] = {}
    for key, value in (*tensors.items(), *facts["values"].items()):
        name, _, state_key = key.rpartition(".")
        by_parameter.setdefault(name, {})[_unescaped(state_key)] = value
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    named = ((number, names.get(id(p))) for number, p in enumerate(parameters))
    state = {number: by_parameter[name] for number, name in named if name in by_parameter}
    numbers = iter(range(len(parameters)))
    groups = []
    for group, saved in zip(optimizer.param_groups, facts["groups"], strict=True):
        options = {key: _like(value, group.get(key)) for key, value in saved["options"].items()}
        groups.append({**options, "params": list(islice(numbers, len(group["params"])))})
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for parameter, loaded in optimizer.state.items():
        _restore_types(loaded, by_parameter.get(names.get(id(parameter), ""), {}))


def _restore_types(loaded: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Put back the values that torch has rounded to the type of their parameter.

    A float32 copy of a bfloat16 parameter, which some optimizers keep, would lose 16 of its bits.
    """
    for key, value in saved.items():
        now = loaded.get(key)
        if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
            loaded[key] = value.to(now.device)


def _escaped(key: str) -> str:
    return key.replace("%", "%25").replace(".", "%2E")


def _unescaped(key: str) -> str:
    return key.replace("%2E", ".").replace("%25", "%")


def _group_names(group: Mapping[str, Any], names: Mapping[int, str]) -> list[str]:
    """Name the parameters of a group, without the stand-in of a process that has none."""
    parameters = [p for p in group["params"] if p.numel() > 0 or id(p) in names]
    for parameter in parameters:
        if id(parameter) not in names:
            raise CheckpointError(
                f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that is not "
                "the model's; make the optimizer from the parameters of the model given here"
            )
    return [names[id(parameter)] for parameter in parameters]


def _options(group: Mapping[str, Any]) -> Json:
    return {
        key: value.item() if isinstance(value, Tensor) else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def _like(value: Any, current: Any) -> Any:
    """Convert `value` to the type of the present option, which JSON did not keep."""
    if isinstance(current, Tensor):
        return torch.as_tensor(value, dtype=current.dtype, device=current.device)
    return tuple(value) if isinstance(current, tuple) else value


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return (shown or "nothing") + (f" and {len(names) - 3} more" if len(names) > 3 else "")
