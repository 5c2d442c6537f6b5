"""Hold every private name of torch that Penstock uses: a new torch is compared with one file.

A private name is one that torch itself defines with a leading underscore, or in a module whose
path has such a part (torch._C): classes, functions, and attributes of torch's objects, such as
the dictionaries of an nn.Module.  A public name is used instead wherever there is one.

Each name has a purpose, and says what happens on a torch without it: "needed" ends the import with
one line that says which versions work; the others do without, as told there.
"""

import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch

from penstock.errors import OLDEST_TORCH, TorchError

if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < OLDEST_TORCH:
    raise TorchError(f"torch {torch.__version__} is installed")


def _needed(owner: Any, name: str) -> Any:
    """Read what Penstock cannot do without.

    Raises:
        TorchError: this torch lacks it.
    """
    try:
        return getattr(owner, name)
    except AttributeError:
        where = getattr(owner, "__name__", type(owner).__name__)
        raise TorchError(f"torch {torch.__version__} has no {where}.{name}") from None


# -- classes ----------------------------------------------------------------------------------

try:
    import torch.utils.checkpoint
    from torch import Tensor, nn
    from torch._ops import OpOverload as OpOverload
    from torch.autograd.graph import Node
    from torch.nn.modules.batchnorm import _BatchNorm as _BatchNorm
    from torch.nn.modules.dropout import _DropoutNd as _DropoutNd
    from torch.nn.utils import parametrize
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
except ImportError as missing:
    raise TorchError(f"torch {torch.__version__} lacks one: {missing}") from None

AnyBatchNorm = _BatchNorm
"""The base of all kinds of BatchNorm, users' own included.  Needed."""
AnyDropout = _DropoutNd
"""The base of all kinds of dropout.  Needed."""


def fake_tensors(**options: Any) -> Any:
    """Return a mode in which tensors have a device but no memory.  Needed."""
    module = _needed(_needed(torch, "_subclasses"), "fake_tensor")
    return _needed(module, "FakeTensorMode")(**options)


# -- switches that keep torch's dispatch away from a subclass of Tensor -------------------------

without_torch_function = _needed(torch._C, "DisableTorchFunctionSubclass")
"""While entered, no subclass sees operations by __torch_function__; modes do.  Needed."""
without_any_torch_function = _needed(torch._C, "DisableTorchFunction")
"""While entered, modes do not see them either.  Needed."""
with_torch_function = _needed(torch._C, "_EnableTorchFunction")
"""While entered, subclasses and modes see operations again.  Needed."""
without_torch_dispatch = _needed(torch._C, "_DisableTorchDispatch")
"""While entered, no subclass sees operations by __torch_dispatch__.  Needed."""

# -- modes of a thread, and compiled code -------------------------------------------------------

dispatch_modes: Callable[[], list[Any]] = getattr(
    torch.utils._python_dispatch, "_get_current_dispatch_mode_stack", list
)
"""List the dispatch modes this thread is under, outermost first; none where torch hides it."""
function_modes = getattr(torch.overrides, "_get_current_function_mode_stack", list)
"""List the function modes this thread is under, outermost first; none where torch hides it."""


def is_default_device(mode: Any) -> bool:
    """Tell whether a function mode is a default device; False where torch hides it."""
    context = getattr(getattr(torch.utils, "_device", None), "DeviceContext", None)
    return context is not None and type(mode) is context


is_profiled: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", bool)
"""Tell whether a profiler records this thread; False where torch hides it."""

COMPILER, COMPILER_LOCK = "torch._dynamo.convert_frame", "compile_lock"
"""The module that compiles, and the lock that it has meanwhile; if hidden, nothing waits."""
COMPILED_CALLS = "torch._dynamo.eval_frame"
"""The module that every compiled call runs; if hidden, layers that draw run uncompiled."""

# -- autograd -----------------------------------------------------------------------------------

_autograd = _needed(torch._C, "_autograd")
disabled_hooks: Callable[[], str | None] = getattr(
    _autograd, "_saved_tensors_hooks_get_disabled_error_message", lambda: None
)
"""Return what `disable_saved_tensors_hooks` was told in this thread; None: nothing, or hidden."""
results_of: Callable[[Node], Sequence[Any]] = attrgetter("_input_metadata")
"""The shape and the dtype of each result of a node's operator.  Needed under a memory limit."""
next_node_number: Callable[[], int] = getattr(_autograd, "_get_sequence_nr", int)
"""Return the number of this thread's next node; 0, if hidden: a failing layer is then a guess."""
saving_hooks = partial(_needed(_autograd, "_top_saved_tensors_default_hooks"), True)
"""Return the innermost saved_tensors_hooks in force, or None.  Needed."""

version_counter: Callable[[Tensor], int] = attrgetter("_version")
"""Count the changes in place of a tensor; RuntimeError for an inference tensor.  Needed."""
gradient_hooks = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks")
"""The hooks of a gradient, when found and when added, by number; None or a dictionary.  Needed."""
has_tensor_hooks: Callable[[Tensor], Any] = attrgetter("_backward_hooks")
"""The hooks of a gradient, when found; what holds none, or None, is false.  Needed."""
uncounted_changes = _needed(torch.autograd, "_unsafe_preserve_version_counter")
"""While entered, changes in place of a tuple of tensors are not counted.  Needed."""


def node_number(node: Node) -> int | None:
    """Return the number of a node of the autograd graph; None where it has none."""
    numbered = getattr(node, "_sequence_nr", None)
    return None if numbered is None else numbered()


def storage_id(tensor: Tensor) -> int:
    """Return what tells storages apart, those without memory (meta) too.

    Falls back on the address of the memory, which is 0 for all those without.
    """
    storage = tensor.untyped_storage()
    return int(getattr(storage, "_cdata", storage.data_ptr()))


def has_accumulation_hooks(parameter: Tensor) -> bool:
    """Tell whether hooks run when a gradient is accumulated; False where torch hides it."""
    return bool(getattr(parameter, "_post_accumulate_grad_hooks", None))


NEVER_COMPUTES = "penstock_never_computes"
"""The attribute of a hook that only returns what it has."""

run_engine = _needed(_needed(torch.autograd.Variable, "_execution_engine"), "run_backward")
"""Run autograd's engine, without the checks of torch.autograd.backward.  Needed."""


def saved_tensors(node: Node, *names: str) -> list[Tensor] | None:
    """Return what a node saved, detached; None if torch hides one, or a hook would compute it."""
    found: list[Any] = []
    for name in names:
        hook = getattr(getattr(node, "_raw_saved_" + name, None), "unpack_hook", True)
        never_computes = hook is None or hasattr(hook, NEVER_COMPUTES)
        found.append(getattr(node, "_saved_" + name, None) if never_computes else None)
    return None if any(t is None for t in found) else [t.detach() for t in found]


def saved_numbers(node: Node, *names: str) -> list[Any] | None:
    """Return what else a node has saved; None where torch hides one of it."""
    found = [getattr(node, "_saved_" + name, names) for name in names]
    return None if any(each is names for each in found) else found


# -- cached weights (torch.nn.utils.parametrize.cached) ------------------------------------------


class _CachedWeights(threading.local):
    """How many `cached()` this thread is in, and the weights it has computed there, if any."""

    depth = 0

    def __init__(self) -> None:
        self.weights: dict[Any, Any] = {}


cached_weights, _counting = _CachedWeights(), threading.Lock()


class _WeightsOfThread(dict[Any, Any]):
    """The cache of all threads: what each reads and writes there is its own."""

    def get(self, key: Any, default: Any = None) -> Any:
        return cached_weights.weights.get(key, default)

    def __setitem__(self, key: Any, weight: Any) -> None:
        if cached_weights.depth:
            cached_weights.weights[key] = weight


_weights = _WeightsOfThread()


@contextmanager
def _caching() -> Iterator[None]:
    _enable(1)
    cached_weights.depth += 1
    try:
        yield
    finally:
        _enable(-1)
        cached_weights.depth -= 1
        if not cached_weights.depth:
            cached_weights.weights = {}


def _enable(change: int) -> None:
    with _counting:
        parametrize._cache_enabled = parametrize._cache_enabled + change
        parametrize._cache = _weights


def _cached() -> Iterator[None]:
    with _penstock_caching():  # type: ignore[name-defined]  # noqa: F821 - runs in torch's module
        yield


def cache_weights_per_thread() -> None:
    """Let `parametrize.cached()` of one thread be unknown to others: torch has one cache for all.

    Whoever has imported the function has the new one too.  A torch whose function is made in
    another way keeps its own.
    """
    generator = getattr(parametrize.cached, "__wrapped__", None)
    names = ("_cache", "_cache_enabled")
    if isinstance(generator, FunctionType) and all(hasattr(parametrize, n) for n in names):
        setattr(parametrize, "_penstock_caching", _caching)  # noqa: B010 - typed as torch has it
        parametrize._cache = _weights
        generator.__code__ = _cached.__code__


@contextmanager
def without_cached_weights() -> Iterator[None]:
    """Be outside every `parametrize.cached()` that this thread is in."""
    before = cached_weights.depth, cached_weights.weights
    cached_weights.depth, cached_weights.weights = 0, {}
    try:
        yield
    finally:
        cached_weights.depth, cached_weights.weights = before


# -- checkpoints of the user's own --------------------------------------------------------------

_GENERATOR = "_checkpoint_without_reentrant_generator"
if hasattr(torch.utils.checkpoint, f"{_GENERATOR}_impl"):  # since torch 2.15; the other calls it
    _GENERATOR = f"{_GENERATOR}_impl"

checkpoint_generator: Callable[..., Iterator[None]] = _needed(torch.utils.checkpoint, _GENERATOR)
"""torch's own code before and after the function in a checkpoint without reentry.  Needed.

It takes the function, its arguments, and the options of the checkpoint by their names.
"""


def replace_checkpoint_generator(replacement: Callable[..., Iterator[None]]) -> None:
    """Let every checkpoint without reentry run `replacement` in its place."""
    setattr(torch.utils.checkpoint, _GENERATOR, replacement)


# -- operators ----------------------------------------------------------------------------------

DRAWING_FUNCTIONS = tuple(
    getattr(torch, n) for n in ("_standard_gamma", "_sample_dirichlet") if hasattr(torch, n)
)
"""Functions that draw, below torch.distributions; a torch without one does not call it."""


def arguments_of(operator: OpOverload) -> Any:
    """Return the arguments an operator declares: name, type, is_write.  Needed."""
    return operator._schema.arguments


# -- modules ------------------------------------------------------------------------------------

parameters_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_parameters")
"""The dictionary in which a module itself has its parameters; to write it, too.  Needed."""
buffers_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_buffers")
"""The same of its buffers.  Needed."""
children_of: Callable[[nn.Module], dict[str, Any]] = attrgetter("_modules")
"""The same of its modules, each as often as it has names.  Needed."""
unsaved_buffers_of: Callable[[nn.Module], set[str]] = attrgetter("_non_persistent_buffers_set")
"""The names of the buffers of a module itself that no state dict holds.  Needed."""
CHILDREN, PARAMETERS, BUFFERS = "_modules", "_parameters", "_buffers"
"""The names of these dictionaries among the attributes of a module."""
_registered = (CHILDREN, PARAMETERS, BUFFERS, "_non_persistent_buffers_set", "_forward_hooks")
for _name in (*_registered, "_call_impl", "_apply"):
    _needed(nn.Module(), _name)


def registered_of(module: nn.Module) -> dict[str, Any]:
    """Return all that a module registers, by the names of its attributes.  Needed."""
    names = (CHILDREN, PARAMETERS, BUFFERS, "_non_persistent_buffers_set")
    return {name: getattr(module, name) for name in names}


forward_hooks_of: Callable[[nn.Module], dict[int, Any]] = attrgetter("_forward_hooks")
"""The forward hooks of a module by number, in the order in which they run; to write it, too."""


def wants_kwargs(module: nn.Module, number: int) -> bool:
    """Tell whether a forward hook is given keyword arguments; False where torch hides it."""
    return number in getattr(module, "_forward_hooks_with_kwargs", ())


def has_hooks(module: nn.Module) -> bool:
    """Tell whether a module has hooks of any kind; those that torch hides are not seen."""
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    return has_gradient_hooks(module) or any(getattr(module, kind, None) for kind in kinds)


def has_gradient_hooks(module: nn.Module) -> bool:
    """Tell whether a module has hooks on its gradients; those that torch hides are not seen."""
    return any(getattr(module, f"_backward_{kind}", None) for kind in ("hooks", "pre_hooks"))


COMPILED_CALL = "_compiled_call_impl"
"""The attribute of a module with what its calls run instead of it, or None.  Copies lack it."""


def call_uncompiled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module and its hooks as they are written.  Needed."""
    return module._call_impl(*args, **kwargs)


def uncompiled(module: nn.Module) -> Callable[..., Any] | None:
    """Return what a compiled module was; None where it is not compiled, or torch hides it."""
    if getattr(module, COMPILED_CALL, None) is not None:
        return partial(call_uncompiled, module)
    return dict(children_of(module).items()).get("_orig_mod")  # torch.jit's is no dictionary


def reset_of(module: nn.Module) -> Callable[[], None] | None:
    """Find what one of torch's modules draws its initial values with; None if it has nothing."""
    return getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))


def move_tensors(module: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
    """Put what `function` returns in place of each parameter, gradient and buffer.  Needed."""
    _needed(module, "_apply")(function)


class AbstractMovable(nn.Module):
    """A module that is told after its tensors were moved or cast (`to`, `half`).  Needed."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._after_move(fn)
        return self

    def _after_move(self, function: Callable[[Tensor], Tensor]) -> None:
        """Take notice that `function` was applied to all tensors."""
        raise NotImplementedError


DDP_ASKS_FOR = "_ddp_params_and_buffers_to_ignore"
"""DistributedDataParallel looks for it in a module; without it a wrong use shows later."""


class AbstractSharedScaler(torch.amp.GradScaler):
    """A GradScaler that may talk to others whenever it has looked for inf and nan.  Needed."""

    def _unscale_grads_(self, *given: Any) -> dict[torch.device, Tensor]:
        look, (_, _, found_inf, _) = super()._unscale_grads_, given
        return self.share(lambda: look(*given), found_inf)

    def share(
        self, look: Callable[[], dict[torch.device, Tensor]], found_inf: Tensor
    ) -> dict[torch.device, Tensor]:
        """Unscale by `look`; return what was found, by device, in tensors like `found_inf`."""
        raise NotImplementedError


_needed(torch.amp.GradScaler, "_unscale_grads_")


def note_steps(optimizer: Any) -> bool:
    """Let schedulers know that an optimizer steps; tell whether hooks of its own run there."""
    optimizer._opt_called = True
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


# -- processes ----------------------------------------------------------------------------------


def default_store() -> Any:
    """Return the store that the processes met at, where it has no address.  Needed there."""
    return _needed(torch.distributed.distributed_c10d, "_get_default_store")()


foreach_norm: Callable[..., Any] = _needed(torch, "_foreach_norm")
"""(tensors, norm type) -> their norms, as torch's clipping takes them.  Needed."""
grouped_by_kind = _needed(torch.optim.Optimizer, "_group_tensors_by_device_and_dtype")
"""([tensors], with_indices=True) -> groups of them in the order of torch's clipping.  Needed."""
