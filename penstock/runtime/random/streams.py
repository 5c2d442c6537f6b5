"""Make random numbers depend on (seed, step, layer, micro-batch) and on nothing else.

Each call of a layer that draws gets a generator seeded from these four.  So dropout masks are the
same for each number of stages, schedule and transport, and again in a recompute.  The stream is
that of torch's default generator after `manual_seed(stream_key(...))`.  Worker threads share the
default generator, so draws go to a generator of the worker instead.
"""

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor, nn

from penstock.errors import RandomnessError
from penstock.runtime.caller import (
    GeneratorsLock,
    default_generator,
    default_generators_lock,
    generators_for,
    have_moved,
    outside_states,
)
from penstock.runtime.devices import with_index
from penstock.torch_private import OpOverload, TorchDispatchMode, arguments_of, saving_hooks

from .generators import kept_outside, seed_outside

AutogradMode = tuple[bool, Any]


def autograd_mode() -> AutogradMode:
    """Return autograd's mode, which differs inside the user's own checkpoint.

    Such a checkpoint (torch.utils.checkpoint, or a torch.autograd.Function that works like it)
    runs layers again in the backward pass.  There random numbers are not keyed, and BatchNorm must
    not count moments again.
    """
    return torch.is_grad_enabled(), saving_hooks()


BETWEEN = -1
"""The number in place of a layer's for the code between layers."""


def stream_key(seed: int, phase: str, step: int, layer: int, microbatch: int) -> int:
    """Hash the coordinates of one layer call into a seed of 63 bits, the same on all machines."""
    text = f"{seed}:{phase}:{step}:{layer}:{microbatch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") & (2**63 - 1)


def new_generator(device: torch.device) -> Generator:
    """Return a generator of a device."""
    return Generator(device)


class KeyedRandomness(TorchDispatchMode):
    """Makes all random operators draw from a generator seeded with `key`.

    `drew_in_checkpoint`: one drew inside the user's own checkpoint, which will draw again in the
    backward pass.  `make` returns the generator for a device, instead of a new one.
    """

    _routes: ClassVar[dict[OpOverload, "Callable[..., Any] | None"]] = {}

    def __init__(
        self,
        key: int,
        *,
        repeatable: bool = False,
        make: Callable[[torch.device], Generator] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.key, self._make = key, make
        self.drew_in_checkpoint = False
        self._repeatable = repeatable
        self._outside = autograd_mode()
        self._generators: dict[torch.device, Generator] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            route = self._routes[func]
        except KeyError:
            route = self._routes[func] = _route(func)
        if route is None or not _draws_now(func, args, kwargs):
            return func(*args, **kwargs)
        self.note_checkpoint()
        if isinstance(kwargs.get("generator"), Generator):
            if self._repeatable:
                raise RandomnessError(
                    f"{func} draws from a generator of the layer's own, so the layer cannot be "
                    "recomputed with the same numbers. Let it draw from torch's default generator "
                    "(Penstock keys it per layer and micro-batch), or use "
                    "recompute=Recompute.NEVER"
                )
            return func(*args, **kwargs)
        return route(self.generator(_device_of(args, kwargs)), args, kwargs)

    def note_checkpoint(self) -> None:
        """Note whether the next draw is inside the user's own checkpoint."""
        self.drew_in_checkpoint |= autograd_mode() != self._outside

    def generator(self, device: torch.device) -> Generator:
        """Return the stream's generator for a device, in the state after its last draw."""
        if device not in self._generators:
            make = self._make
            made = make(device) if make else new_generator(device).manual_seed(self.key)
            self._generators[device] = made
        return self._generators[device]


class RefuseDraws(TorchDispatchMode):
    """Makes all random operators raise RandomnessError: their forward's numbers are not known."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _may_draw(func) and _draws_now(func, args, kwargs or {}):
            raise drew_in_backward(str(func))
        return func(*args, **(kwargs or {}))


class WatchDraws(TorchDispatchMode):
    """Finds where a function draws from the default generators, while it has these alone.

    `has_checkpoint`: an operator ran inside what may be the user's own checkpoint.
    `in_checkpoint`: a random operator did.  `outside`: a random operator ran outside the calls of
    `modules`.  `unseen`: the user's own operator drew, and no random operator.
    """

    def __init__(self, device: torch.device, modules: Iterable[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self.has_checkpoint = self.in_checkpoint = self.outside = self.unseen = False
        self._generators = generators_for([device])
        self._modules, self._depth = tuple(modules), 0
        self._thread = threading.get_ident()
        self._outside = autograd_mode()
        self._states: list[Tensor] = []

    def run(self, function: Callable[[], Any]) -> Any:
        """Run `function`, and watch its draws."""
        # Hooks count the depth of calls of `modules`; the mode looks at each operator.
        handles = [
            handle
            for module in self._modules
            for handle in (
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(self._leave, always_call=True),
            )
        ]
        self._states = [g.get_state() for g in self._generators]
        try:
            with self:
                result = function()
        finally:
            for handle in handles:
                handle.remove()
        self.unseen |= have_moved(self._generators, self._states)
        return result

    # Another stage may call a shared module in its thread: such calls do not count.

    def _enter(self, module: nn.Module, args: Any) -> None:
        self._depth += threading.get_ident() == self._thread

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._depth -= threading.get_ident() == self._thread

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_in_checkpoint = autograd_mode() != self._outside
        self.has_checkpoint |= is_in_checkpoint
        if not (_may_draw(func) and _draws_now(func, args, kwargs or {})):
            return func(*args, **(kwargs or {}))
        self.in_checkpoint |= is_in_checkpoint
        self.outside |= not self._depth
        self.unseen |= have_moved(self._generators, self._states)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self._states = [g.get_state() for g in self._generators]


def _may_draw(func: OpOverload) -> bool:
    """Tell whether an operator may draw; torch also tags some that do not."""
    name = func.name()
    tagged = torch.Tag.nondeterministic_seeded in func.tags
    return tagged and "_backward" not in name and "_fused_sdp_choice" not in name


def _draws_now(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether an operator that may draw does: attention without dropout does not."""
    for place, argument in enumerate(arguments_of(func)):
        if argument.name == "dropout_p":
            probability = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
            return bool(probability)
    return True


def _route(func: OpOverload) -> Callable[..., Any] | None:
    """Return a function that runs an operator with a generator; None if it never draws."""
    if not _may_draw(func):
        return None
    # Look for an overload, the operator itself first, with the same arguments and a generator.
    packet = func.overloadpacket
    wanted = [(a.name, str(a.type)) for a in arguments_of(func) if a.name != "generator"]
    for twin in (func, *(getattr(packet, name) for name in packet.overloads())):
        arguments = [(a.name, str(a.type)) for a in arguments_of(twin)]
        others = [a for a in arguments if a[0] != "generator"]
        if others == wanted and len(arguments) == len(wanted) + 1:
            return lambda generator, args, kwargs: twin(
                *args, **{**kwargs, "generator": generator}
            )
    return lambda generator, args, kwargs: _with_default_state(func, generator, args, kwargs)


def _with_default_state(func: OpOverload, generator: Generator, args: Any, kwargs: Any) -> Any:
    """Run an operator that takes no generator: set the default one's state for the call."""
    default = default_generator(generator.device)
    with default_generators_lock.get(), lent_to_default(default, generator):
        return func(*args, **kwargs)


@contextmanager
def lent_to_default(default: Generator, generator: Generator) -> Iterator[None]:
    """Let a default generator draw what `generator` would, and move that one instead."""
    if default.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # By reference: a CUDA graph allows no copies of states.
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(generator.graphsafe_get_state())
        try:
            yield
        finally:
            default.graphsafe_set_state(before)
        return
    state = default.get_state()
    default.set_state(generator.get_state())
    try:
        yield
    finally:
        generator.set_state(default.get_state())
        default.set_state(state)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    if kwargs.get("device") is not None:
        return with_index(torch.device(kwargs["device"]))
    return next((a.device for a in args if isinstance(a, Tensor)), torch.device("cpu"))


# -- the default generators, which all threads share, lent to one layer or backward at a time --


def runs_and_draws(
    key: int, function: Callable[[], Any], device: torch.device, *, outside: bool = False
) -> tuple[Any, bool, bool]:
    """Run `function` with torch's default generators seeded with `key`; tell whether it drew.

    The numbers are the same as under `KeyedRandomness`, and kernels choose their paths as usual;
    but only one thread at a time may do so.  The user's own checkpoint saves the state of these
    generators, and so repeats its numbers in the backward pass.

    With `outside`, Python's and NumPy's global generators are seeded too; the third result tells
    whether these drew.
    """
    restoring = kept_outside() if outside else nullcontext()
    with alone_with_generators(device) as generators, restoring:
        if outside:
            seed_outside(key)
        seeded = [g.manual_seed(key).get_state() for g in generators]
        before = outside_states() if outside else None
        result = function()
        drew_outside = outside and outside_states() != before
        return result, have_moved(generators, seeded), drew_outside


@contextmanager
def alone_with_generators(device: torch.device) -> Iterator[list[Generator]]:
    """Lock torch's default generators for this thread, and restore their states.

    A backward pass with checkpoints needs this: each sets the generators to the state of its
    forward for a while.
    """
    # A pipeline inside this layer takes the new lock of its context: ours is held here.
    generators = generators_for([device])
    with default_generators_lock.get():
        before = [(generator, generator.get_state()) for generator in generators]
        token = default_generators_lock.set(GeneratorsLock())  # for another pipeline inside
        try:
            yield generators
        finally:
            for generator, state in before:
                generator.set_state(state)
            default_generators_lock.reset(token)


@contextmanager
def checked_draws(device: torch.device) -> Iterator[None]:
    """Let the user's checkpoints, which restore generators, draw; RandomnessError for others."""
    generators = generators_for([device])
    before = [generator.get_state() for generator in generators]
    yield
    if have_moved(generators, before):
        raise drew_in_backward("a layer")


@contextmanager
def refuse_outside_draws() -> Iterator[None]:
    """Raise RandomnessError if Python's or NumPy's global generator draws in a backward pass."""
    before = outside_states()
    yield
    if outside_states() != before:
        raise drew_in_backward("a layer that draws from Python's or NumPy's global generator")


def drew_in_backward(who: str) -> RandomnessError:
    return RandomnessError(
        f"{who} drew random numbers during the backward pass that are not those of its forward: "
        "it runs again there, in a torch.utils.checkpoint that was switched on after its first "
        "steps, or keeps no random state (preserve_rng_state=False), or in a checkpoint written "
        "by hand; or the backward of an operator of your own draws, which has no numbers of its "
        "own to draw: draw them in its forward. No checkpoint keeps the state of Python's random "
        "or numpy.random. The gradients of this step must not be used: zero "
        "them. A checkpoint that was switched on is known from the next step; for other "
        "checkpoints, use recompute=Recompute.STAGE"
    )
