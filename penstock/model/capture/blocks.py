"""Choose the blocks of a model, and the blocks that stay on one stage."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from penstock.errors import CutError
from penstock.torch_private import has_gradient_hooks

from .forward_pass import Maker
from .outer_state import OwnState, is_kept_by_one
from .recording import Recording, SideChannel, WroteOutside
from .routes import BlockCall, sources_of_blocks
from .watch import original_class

_LARGE_SHARE = 1 / 32
"""Share of all parameters above which a module that holds lists is opened."""
_LISTS = (nn.ModuleList, nn.ModuleDict)


def find_blocks(
    model: nn.Module,
    patterns: Sequence[str] | None,
    opened: Iterable[type] = (),
    closed: Iterable[type] = (),
) -> dict[str, nn.Module]:
    """Return the blocks of a model by name, in the order of registration.

    Entries of lists are blocks, and so are other modules with parameters that hold no lists, or
    are small.  Modules without parameters are not: their operations lie between blocks.  Modules
    of `opened` classes are not blocks, but their children are.  Modules of `closed` classes are
    always blocks, with all that is in them.  A CutError refuses a pattern that fits no module, or
    one inside another block.
    """
    if patterns is not None:
        return _matching(model, patterns)
    total = sum(p.numel() for p in model.parameters()) or 1
    search = _Search(frozenset(opened), frozenset(closed), total * _LARGE_SHARE)
    return dict(search.blocks(model, "", in_list=False))


def _matching(model: nn.Module, patterns: Sequence[str]) -> dict[str, nn.Module]:
    named = [(name, module) for name, module in model.named_modules() if name]
    for pattern in patterns:
        if not any(fits(name, pattern) for name, _ in named):
            there = ", ".join(name for name, _ in named[:12])
            more = f" and {len(named) - 12} more" if len(named) > 12 else ""
            raise CutError(
                f"blocks={list(patterns)}: no module of {type(model).__name__} is called "
                f"{pattern!r}; there are {there}{more}"
            )
    blocks = {n: m for n, m in named if any(fits(n, pattern) for pattern in patterns)}
    for name in blocks:
        outer = next((other for other in blocks if name.startswith(f"{other}.")), None)
        if outer is not None:
            raise CutError(
                f"blocks={list(patterns)} name {outer!r} and {name!r} inside it; name one of them"
            )
    return blocks


def fits(name: str, pattern: str) -> bool:
    """Tell whether a pattern fits a module's name, part by part: `*` matches no dot."""
    parts, patterns = name.split("."), pattern.split(".")
    alike = len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))
    return alike or name == pattern


@dataclass(frozen=True, slots=True)
class _Search:
    """The `opened` and `closed` classes, and the number of parameters of a large module."""

    opened: frozenset[type]
    closed: frozenset[type]
    large: float

    def blocks(
        self, module: nn.Module, prefix: str, *, in_list: bool
    ) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            path, count = f"{prefix}{name}", _size(child)
            if original_class(child) in self.closed:
                yield path, child
                continue
            if not count and not self.closed:
                continue
            is_list = isinstance(child, _LISTS)
            if is_list or self._is_opened(child, count, in_list=in_list):
                yield from self.blocks(child, f"{path}.", in_list=is_list)
            elif count:
                yield path, child

    def _is_opened(self, module: nn.Module, count: int, *, in_list: bool) -> bool:
        """Tell whether a module's parts are blocks instead of it: it is large and holds a list.

        An entry of a list is opened if most of it is a list of modules of one class, such as a
        stage of Swin.
        """
        if original_class(module) in self.opened and any(True for _ in module.children()):
            return True
        lists = [
            part
            for part in self._parts(module)
            if isinstance(part, _LISTS) or (isinstance(part, nn.Sequential) and len(part) > 1)
        ]
        if count <= self.large or not any(map(_size, lists)):
            return False
        return not in_list or any(
            len(entries) > 1
            and 2 * _size(entries) > count
            and len({type(entry) for entry in entries}) < len(entries)
            for entries in lists
            if not isinstance(entries, nn.ModuleDict)
        )

    def _parts(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield a module and all modules in it, without closed ones."""
        yield module
        for child in module.children():
            if original_class(child) not in self.closed:
                yield from self._parts(child)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def module_around(model: nn.Module, block: str) -> str:
    """Return the path of the module whose forward calls a block: it holds it, or its list."""
    path = block.rpartition(".")[0]
    while path and isinstance(model.get_submodule(path), _LISTS):
        path = path.rpartition(".")[0]
    return path


def are_side_by_side(model: nn.Module, block: str, sources: Mapping[str, Collection[str]]) -> bool:
    """Tell whether a block is in a list whose entries do not depend on each other."""
    path = block.rpartition(".")[0]
    entries = model.get_submodule(path)
    called = {name for name in sources if name.rpartition(".")[0] == path}
    if not isinstance(entries, _LISTS) or len(entries) < 2:
        return False
    return not any(called.intersection(sources[name]) for name in called)


def check_modules(model: nn.Module) -> None:
    """Raise CutError for a lazy module, or a TorchScript module, which does not run in Python."""
    for path, module in model.named_modules():
        if any(is_lazy(tensor) for tensor in module.parameters(recurse=False)):
            raise CutError(
                f"{path!r} is lazy: its parameters get their shapes in its first call. Call the "
                "model once on an example before it is captured"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise CutError(
                f"{path!r} is a TorchScript module, of which no stage can run a part. Give the "
                "module that it was scripted from; torch.compile of a block is followed"
            )


def check_hooks(model: nn.Module, blocks: Iterable[nn.Module]) -> None:
    """Raise CutError for gradient hooks of a module with several blocks: no stage has all."""
    inside = {id(part) for block in blocks for part in block.modules()}
    for path, module in model.named_modules():
        if id(module) not in inside and has_gradient_hooks(module):
            raise CutError(
                f"{path or type(model).__name__!r} has a hook on its gradients and holds several "
                "blocks, of which each stage has its own; put the hook on a block"
            )


# -- the choice, corrected by recordings ----------------------------------------------------------


class Choice:
    """The blocks of a model, corrected until a recording succeeds.

    A class whose tensors leave it by side channels is opened.  A class that keeps state between
    blocks, or chooses its parts by values, becomes a block.
    """

    def __init__(self, model: nn.Module, patterns: Sequence[str] | None) -> None:
        self._model, self._patterns = model, patterns
        self.opened: list[type] = []
        self.closed: dict[type, OwnState] = {}
        self.choosing: list[type] = []
        self.makers: list[Maker] = []
        self._found: dict[str, nn.Module] = {}
        self._refused: CutError = CutError(
            f"{type(model).__name__} has no modules with parameters in it, and so no blocks to "
            "cut at; put what is to be one in an nn.Module, or give the whole as a list: [model]"
        )

    def blocks(self) -> dict[str, nn.Module]:
        """Find the blocks."""
        closed = {*self.closed, *self.choosing}
        self._found = find_blocks(self._model, self._patterns, self.opened, closed)
        if not self._found:
            raise self._refused
        return self._found

    def open(self, error: SideChannel) -> None:
        """Open the class of the block in the error: its parts become blocks."""
        module = self._found[error.block]
        kind = original_class(module)
        has_parts = any(True for _ in module.children())
        known = {*self.opened, *self.closed, *self.choosing}
        if self._patterns is not None or kind in known or not has_parts:
            raise error
        self.opened.append(kind)
        self._refused = error

    def close(self, error: OwnState) -> None:
        """Make blocks of all modules of the class in the error."""
        if self._patterns is not None or not error.path:
            raise error
        module = self._model.get_submodule(error.path)
        kind, counts = original_class(module), [*map(_size, (module, self._model))]
        if kind in {*self.opened, *self.closed} or 2 * counts[0] > counts[1]:
            raise error
        if not is_kept_by_one(self._model, error.path, error.name):
            raise error
        self.closed[kind] = error

    def route(self, error: WroteOutside) -> None:
        """Route the tensor in the error from the stage that makes it, as any other value."""
        if error.made_by in self.makers:
            raise error
        self.makers.append(error.made_by)

    def close_around_chosen(self, recordings: Iterable[Recording]) -> bool:
        """Make blocks of modules that choose their parts by values; tell whether there are any.

        Such parts are experts: they are in an entry of a list, or do not depend on each other.  A
        chain of layers that may be skipped stays open.
        """
        if self._patterns is not None:
            return False
        # 1. Unite what all recordings say: the sources of each block, and blocks chosen by values.
        sources: dict[str, frozenset[str]] = {}
        chosen: set[str] = set()
        for recording in recordings:
            sources_here, chosen_here = sources_of_blocks(recording.events)
            chosen |= chosen_here
            for block, blocks_before in sources_here.items():
                sources[block] = sources.get(block, frozenset()) | blocks_before
        # 2. Close the innermost module around a chosen block, if its parts are experts.
        innermost_first = sorted(chosen, key=lambda name: (-name.count("."), name))
        for block in innermost_first:
            path = module_around(self._model, block)
            kind = original_class(self._model.get_submodule(path))
            if not path or kind in {*self.opened, *self.choosing}:
                continue
            parts = path.split(".")
            around = (self._model.get_submodule(".".join(parts[:n])) for n in range(1, len(parts)))
            is_in_list = any(isinstance(outer, _LISTS) for outer in around)
            if is_in_list or are_side_by_side(self._model, block, sources):
                self.choosing.append(kind)
                return True
        return False

    def check(self, calls: Sequence[BlockCall]) -> None:
        """Refuse a module with state that is called several times, perhaps on several stages."""
        times = Counter(block for block, _ in calls)
        for block, module in self._found.items():
            error = self.closed.get(original_class(module))
            if error is not None and times[block] > 1:
                raise CutError(str(error))


# -- blocks that stay on one stage ----------------------------------------------------------------

Groups = tuple[frozenset[str], ...]
"""Names of blocks that belong together."""


def find_groups(
    together: Sequence[str] | Sequence[Sequence[str]] | None,
    blocks: Collection[str],
    argument: str = "together",
) -> Groups:
    """Resolve lists of name patterns to blocks; CutError if a pattern fits none."""
    alone = [entry for entry in together or () if isinstance(entry, str)]
    several = [entry for entry in together or () if not isinstance(entry, str)]
    groups = []
    for patterns in [*([alone] if alone else []), *several]:
        group: set[str] = set()
        for pattern in patterns:
            depth = pattern.count(".") + 1  # a block may have been opened since
            fitting = {n for n in blocks if fits(".".join(n.split(".")[:depth]), pattern)}
            if not fitting:
                raise CutError(
                    f"{argument} names {pattern!r}, which fits no block; there are "
                    f"{', '.join(blocks)}"
                )
            group |= fitting
        groups.append(frozenset(group))
    return tuple(groups)


def ranges_of(groups: Groups, calls: Sequence[BlockCall]) -> tuple[tuple[int, int], ...]:
    """Return the first and last call of each group; merge groups that overlap."""
    ranges = []
    for group in groups:
        places = [place for place, (block, _) in enumerate(calls) if block in group]
        if places:
            ranges.append((places[0], places[-1]))
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1]:
            first, last = merged[-1][0], max(last, merged.pop()[1])
        merged.append((first, last))
    return tuple(merged)
