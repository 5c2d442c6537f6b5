"""One execution of a model's own forward, as a sequence of events.

block call                      event 0 of that call      runs natively inside
operation on a routed tensor    event n after the call    between blocks: residual sums, masks
anything else between blocks    no event                  runs on every stage
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from penstock.errors import GlueError
from penstock.model.pytree import Leaf, flatten, unflatten, with_new_containers
from penstock.torch_private import version_counter, without_torch_function

from .activation_checkpoints import checkpointed
from .containers import can_change, changed, entries_of, on_copies, parts, put_back
from .errors import calling_line, changes_container
from .events import (
    START,
    EventKey,
    Header,
    Info,
    Operation,
    Told,
    ValueId,
    name_of,
    told_structure,
)
from .ghost import CURRENT, PLAIN, AbstractPass, Ghost, answer, is_question
from .operations import draws

Perform = Callable[[EventKey, Callable[[], Any]], Any]
"""(event, function) -> the function's result: runs a block call or a random operation.

Random operations have their own count, so that no other operation changes their random numbers.
"""
Maker = tuple[str, str]
"""The name of a function that makes a tensor between blocks, and the line that calls it."""
GRADIENT_HOOKS = (Tensor.register_hook, Tensor.retain_grad)
"""Calls that ask for the gradient of a tensor between blocks."""
_ADDRESSES = frozenset((Tensor.data_ptr, Tensor.untyped_storage, Tensor.__dlpack__))
"""Calls that ask where in memory a tensor is."""


def maker(function: Any) -> Maker:
    """Return the name of a function, and the line that calls it now."""
    return getattr(function, "__name__", str(function)), calling_line()


def plainly(key: EventKey, function: Callable[[], Any]) -> Any:
    """Run an event without anything around it."""
    return function()


def unchanged(tensor: Tensor) -> Tensor:
    return tensor


class Pass(AbstractPass, ABC):
    """One execution of a model's forward.

    `names` are its blocks, by the id of their module; `parameters` the ids of its parameters, or
    of their stand-ins.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        parameters: Collection[int],
        *,
        perform: Perform = plainly,
        sees_all: bool = False,
    ) -> None:
        self._names, self._parameter_ids, self._perform = names, parameters, perform
        self._sees_all = sees_all
        self._calls: dict[str, int] = {}
        self._last = START
        self._number = self._drawn = 0
        self.is_answering = False
        self.is_inside = False
        self.checkpoint: Callable[..., Any] | None = None
        self.routed_makers: Collection[Maker] = ()
        """Functions between blocks whose new tensors are written into; their calls are events."""
        self.keep: Collection[str] = ()
        """Blocks whose results are returned beside the output, if no gradients are recorded."""
        self._beside: dict[str, Any] = {}
        self.asks_for_grad = False
        self.home = object()
        """The identity of this pass, which its ghosts carry."""
        self.header: Header = {}
        self._not_followed: GlueError | None = None

    # -- calls from the model's forward -------------------------------------------------------

    def operation(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle an operation on ghosts."""
        if self.is_inside:  # a ghost hid in an object
            return function(*self._unwrapped(args), **self._unwrapped(kwargs))
        if is_question(function, args, kwargs):
            self.is_answering = True
            try:
                return answer(function, args, kwargs)
            finally:
                self.is_answering = False
        if function in _ADDRESSES:
            raise GlueError(
                f"the code between blocks asks where in memory a routed value is "
                f"({calling_line()}), and another stage has it. Put that code into an nn.Module "
                "with parameters, and name it in blocks="
            )
        return self.event(self._between(function, args, kwargs))

    def block_call(
        self, module: nn.Module, native: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Handle a call of one of the blocks."""
        block = self._names[id(module)]
        call = self._calls.get(block, 0)
        self._calls[block] = call + 1
        key = EventKey(block, call, 0)
        self._last, self._number, self._drawn = key, 0, 0
        result = self.event(Operation(key, block, native, args, kwargs))
        result = put_back(result, key, args, kwargs)
        if block in self.keep and not torch.is_grad_enabled():
            self._beside[name_of(block, call)] = with_new_containers(result)
        return result

    @abstractmethod
    def event(self, operation: Operation) -> Any:
        """Run an operation, or replay it."""

    def knows(self, module: nn.Module) -> bool:
        """Tell whether a module is a block of this pass."""
        return id(module) in self._names

    def run(self, model: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """Execute the model; return its output with real tensors."""
        token = CURRENT.set(self)
        try:
            with _Everything(self) if self._sees_all else nullcontext():
                output = model(*args, **kwargs)
                if self.keep and not torch.is_grad_enabled():
                    output = output, self._beside
                return self.ended(output)
        except RuntimeError as error:
            if self._not_followed is None or error is self._not_followed:
                raise
            raise self._not_followed from error  # TorchScript replaces it by its own error
        finally:
            CURRENT.reset(token)

    def ended(self, output: Any) -> Any:
        """Return the model's output with real tensors for ghosts."""
        return self._unwrapped(output)

    # -- running an event ---------------------------------------------------------------------

    def execute(self, operation: Operation) -> Any:
        """Run an event on real tensors; return ghosts of its result, and add it to the header."""
        # 1. Replace ghosts by their tensors, without recursion if no argument is a container.
        key, _, function, args, kwargs = operation
        ghosts_by_id: dict[int, Ghost] = {}
        reals: list[Any] = []
        for part in args if not kwargs else (*args, *kwargs.values()):
            kind = type(part)
            if kind is Ghost and part.home is self.home and part.here is not None:
                ghosts_by_id[id(part)] = part
                reals.append(part.here)
            elif kind in PLAIN:
                reals.append(part)
            elif kind is Tensor and not key.number:
                reals.append(self.instead_of(part))
            else:
                return self._execute_on_nested(operation)
        if kwargs:
            kwargs = dict(zip(kwargs, reals[len(args) :], strict=True))
        # 2. Run it; a version counter that rises shows an argument that was changed in place.
        ghosts = [*ghosts_by_id.values()]
        versions = [_version(ghost.here) for ghost in ghosts]
        result = self._natively(key, function, tuple(reals[: len(args)]), kwargs)
        for ghost, version in zip(ghosts, versions, strict=True):
            if _version(ghost.here) != version:
                return self.result_of(operation, result, ghosts, versions)
        return self.result_of(operation, result, ghosts, None)

    def _execute_on_nested(self, operation: Operation) -> Any:
        """Run an event with containers, or with tensors that each stage makes, as arguments."""
        # 1. Replace ghosts by their tensors; a block gets new containers, which it may fill.
        key, _, function, args, kwargs = operation
        ghosts_by_id: dict[int, Ghost] = {}
        others: list[Tensor] = []
        args = tuple([self._opened(part, ghosts_by_id, others) for part in args])
        kwargs = {n: self._opened(part, ghosts_by_id, others) for n, part in kwargs.items()}
        own_parts: list[Any] = []
        if any(map(can_change, (*args, *kwargs.values()))):
            if key.number:
                own_parts = parts((args, kwargs))
            else:
                tensors, structure = flatten((args, kwargs))
                function = on_copies(key, function, structure)
                args, kwargs = tuple(tensors), {}
        # 2. Run it, and refuse changes that other stages would not see.
        contents = entries_of(own_parts)
        ghosts = list(ghosts_by_id.values())
        versions = [_version(ghost.here) for ghost in ghosts]
        before = [_version(tensor) for tensor in others] if key.number else ()
        result = self._natively(key, function, args, kwargs)
        for number in changed(own_parts, contents):
            raise changes_container(own_parts[number], key)
        for tensor, version in zip(others, before, strict=False):
            if _version(tensor) != version:
                self.wrote_outside(tensor, operation)
        written = any(_version(g.here) != v for g, v in zip(ghosts, versions, strict=True))
        return self.result_of(operation, result, ghosts, versions if written else None)

    def result_of(
        self, operation: Operation, result: Any, ghosts: list[Ghost], versions: list[int] | None
    ) -> Any:
        """Record the result of an event, and return its ghosts.

        `ghosts` are its arguments.  `versions` are their versions before it, if one of them was
        changed in place.
        """
        key, name = operation[:2]
        changed = () if versions is None else self._note_changes(key, ghosts, versions)
        known = {id(ghost.here): ghost for ghost in ghosts}
        leaves, structure = flatten(result)
        given = []
        for place, leaf in enumerate(leaves):
            ghost = leaf if type(leaf) is Ghost else known.get(id(leaf))
            given.append(self.given(key, place, leaf) if ghost is None else ghost)
        infos = tuple([ghost.info for ghost in given])
        self.tell(key, Told(name, told_structure(structure, key), infos, changed))
        return given[0] if type(structure) is Leaf else unflatten(structure, given)

    def tell(self, key: EventKey, told: Told) -> None:
        """Add the result of an event to the header."""
        self.header[key] = told

    def _natively(
        self, key: EventKey, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run a block call or an operation; one that draws runs by `perform`, as a layer."""
        self.is_inside = True
        try:
            if key.number and not draws(function, args, kwargs):
                return function(*args, **kwargs)
            run = partial(function, *args, **kwargs)
            if key.number:
                self._drawn += 1
                key = key._replace(number=self._drawn)
            elif self.checkpoint is not None:
                run = partial(checkpointed, self.checkpoint, function, args, kwargs)
            return self._perform(key, run)
        finally:
            self.is_inside = False

    @abstractmethod
    def wrote_outside(self, tensor: Tensor, operation: Operation) -> None:
        """Refuse a write into a tensor that is not routed, if a stage follows."""

    def given(self, key: EventKey, place: int, tensor: Tensor) -> Ghost:
        """Make the ghost of a tensor in the result of an event."""
        return Ghost.standing_for(self.describe(tensor, ValueId(key, place)), tensor, self.home)

    def describe(self, tensor: Tensor, value: ValueId) -> Info:
        """Describe a tensor without its values."""
        return Info.of(tensor, value)

    def real(self, ghost: Ghost) -> Tensor:
        """Return the tensor of a ghost, which must be on this stage."""
        assert ghost.here is not None
        return ghost.here

    def _opened(self, value: Any, ghosts: dict[int, Ghost], others: list[Tensor]) -> Any:
        """Replace ghosts by their tensors anywhere in a value; collect all tensors."""
        kind = type(value)
        if kind is Ghost:
            if value.home is not self.home:
                raise GlueError(
                    f"the {value.info.value} of another micro-batch is read ({calling_line()}), "
                    "which the model's code has kept in a global variable, say. Keep such values "
                    "in local variables"
                )
            ghosts.setdefault(id(value), value)
            return self.real(value)
        if kind in PLAIN:
            return value
        if kind is tuple:
            return tuple([self._opened(part, ghosts, others) for part in value])
        if kind is dict:
            return {name: self._opened(part, ghosts, others) for name, part in value.items()}
        if isinstance(value, Tensor):
            others.append(value)
            return self.instead_of(value)
        leaves, structure = flatten(value)
        if not leaves:
            return value
        return unflatten(structure, [self._opened(leaf, ghosts, others) for leaf in leaves])

    def _unwrapped(self, value: Any) -> Any:
        return self._opened(value, {}, [])

    def instead_of(self, tensor: Tensor) -> Tensor:
        """Return the replacement of a tensor that is no ghost."""
        return tensor

    def _note_changes(
        self, key: EventKey, ghosts: list[Ghost], versions: list[int]
    ) -> tuple[tuple[int, Info], ...]:
        changed = []
        for number, (ghost, version) in enumerate(zip(ghosts, versions, strict=True)):
            tensor = self.real(ghost)
            if _version(tensor) != version:
                ghost.info = self.describe(tensor, ValueId(key, -1 - number))
                changed.append((number, ghost.info))
        return tuple(changed)

    # -- operations without ghosts ------------------------------------------------------------

    def unrouted(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle an operation between blocks without ghosts."""
        if not is_question(function, args, kwargs):
            drawn = draws(function, args, kwargs)
            reads = any(id(t) in self._parameter_ids for t in flatten((args, kwargs))[0])
            if drawn or reads or (self.routed_makers and maker(function) in self.routed_makers):
                with without_torch_function():
                    return self.event(self._between(function, args, kwargs))
        return function(*args, **kwargs)

    def inside(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Handle an operation inside a block or another operation."""
        return function(*args, **kwargs)

    def _between(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Operation:
        """Name an operation by the block call before it."""
        self._number += 1
        key = EventKey(self._last.block, self._last.call, self._number)
        name = getattr(function, "__name__", None) or str(function)
        return Operation(key, name, function, args, kwargs)

    def below_torch_function(self, function: Any) -> GlueError:
        """Return the error for an operation that passes cannot follow (E5)."""
        name = getattr(getattr(function, "overloadpacket", function), "__name__", str(function))
        self._not_followed = GlueError(
            f"aten.{name} reached a routed value inside jit.script, vmap or C++, after "
            f"{self._last} ({calling_line()}). Put that code into an nn.Module of its own and "
            "name it in blocks="
        )
        return self._not_followed


class _Everything(TorchFunctionMode):
    """Shows a pass the operations without ghosts, too."""

    def __init__(self, current: Pass) -> None:
        super().__init__()
        self._pass = current

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, Ghost) for kind in types):
            return func(*args, **kwargs)
        if self._pass.is_inside:
            return self._pass.inside(func, args, kwargs)
        return self._pass.unrouted(func, args, kwargs)


def _version(tensor: Any) -> int:
    try:
        version: int = version_counter(tensor)
    except RuntimeError:  # an inference tensor has no version
        return 0
    return version
