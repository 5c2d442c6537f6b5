"""A model as an ordered list of layers, with the code that splits, places and runs them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.torch_private import CHILDREN, children_of, parameters_of, registered_of

from .materialize import Mine, Placed
from .output_loss import output_loss
from .owned import with_loss
from .stage_plan import Crossing, Perform, StagePlan, Step


@dataclass(frozen=True, slots=True)
class Layers(ABC):
    """Layers in order: a list of modules, or the block calls of a captured model.

    Iteration yields `Step`s.

    Args:
        steps: the layers.
        model: the module whose forward calls them; None for a list.
        together: first and last layer of ranges that stay on one stage; ranges do not overlap.
    """

    steps: tuple[Step, ...]
    model: nn.Module | None = None
    together: tuple[tuple[int, int], ...] = ()

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __str__(self) -> str:
        return self.describe(self.parameter_counts())

    # -- different for a list and a captured model ------------------------------------------------

    @abstractmethod
    def run(self, inputs: Any, perform: Perform | None = None) -> Any:
        """Run all layers as the unsplit model does.

        With `perform`, run them as `StagePlan.run` does: by calling `perform` with each layer and
        the partial function that runs it.
        """

    @abstractmethod
    def run_noting(self, inputs: Any, perform: Perform) -> tuple[Any, tuple[Crossing, ...]]:
        """Run all layers at once, and record the transfers if each layer were a stage."""

    @abstractmethod
    def plan_stages(self, partition: tuple[int, ...]) -> tuple[StagePlan, ...]:
        """Split the layers into stages, and route every value between them."""

    @abstractmethod
    def place(self, mine: Mine, seed: int, *, draws: bool, placed: Placed | None = None) -> None:
        """Move the layers of the stages `mine` to their devices, or initialise them there.

        All other layers lose their memory and keep their shapes.  Without `draws`, a layer without
        values gets memory only, as a file has its values.  `placed` may keep slices of a layer's
        weights before the next layer is placed.
        """

    @abstractmethod
    def names(self) -> Sequence[str]:
        """Return the names of all parameters, also of other processes, in the model's order."""

    @abstractmethod
    def as_one_value(self, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Return the arguments of a pipeline's call as one value, the model's input.

        Raises:
            ConfigError: the layers are a list, which takes one value, and the call has others.
        """

    def has_input(self, name: str) -> bool:
        """Tell whether a call may have an argument of this name; layers take one value."""
        return False

    @abstractmethod
    def too_few(self, num_stages: int, most: int) -> Exception:
        """Return the error for more stages than `most`, the most that these layers allow."""

    @abstractmethod
    def describe(self, counts: Sequence[int]) -> str:
        """Return the layers as a table, with their numbers of parameters."""

    # -- the same for both -----------------------------------------------------------------------

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """The (start, end) of each range of layers that stays on one stage."""
        inside = {n for first, last in self.together for n in range(first + 1, last + 1)}
        starts = [index for index in range(len(self)) if index not in inside]
        return tuple(zip(starts, [*starts[1:], len(self)], strict=True))

    def check_enough(self, num_stages: int) -> None:
        """Refuse more stages than the layers allow.

        Raises:
            PartitionError: there are too few layers.
            CutError: there are too few, in a captured model.
        """
        if num_stages > len(self.spans):
            raise self.too_few(num_stages, len(self.spans))

    def parameter_counts(self) -> tuple[int, ...]:
        """Count the parameters of each layer; a shared one counts in its first layer."""
        seen: set[int] = set()
        counts = []
        for step in self.steps:
            new = {id(p): p.numel() for p in step.module.parameters() if id(p) not in seen}
            seen |= new.keys()
            counts.append(sum(new.values()))
        return tuple(counts)

    def check_sharing(self, stage_of: Sequence[int]) -> None:
        """Refuse a tensor that layers on different stages share, and a cut inside `together`.

        Stages of a captured model may share a parameter: its home sends it.

        Raises:
            PartitionError: names the two layers, and the partitions that would work.
        """
        owner: dict[int, tuple[Step, str]] = {}
        for step in self.steps:
            parameters = step.module.named_parameters() if self.model is None else ()
            for name, tensor in (*parameters, *step.module.named_buffers()):
                first, first_name = owner.setdefault(id(tensor), (step, name))
                if stage_of[first.index] != stage_of[step.index]:
                    raise _shared((first, first_name), (step, name), stage_of)
        for n, m in self.together:
            if stage_of[n] != stage_of[m]:
                raise PartitionError(
                    f"the partition puts {self.steps[n].label} on stage {stage_of[n]} and "
                    f"{self.steps[m].label} on stage {stage_of[m]}, which together= keeps "
                    f"on one; let no stage begin at layers {n + 1} to {m}"
                )

    def registered(self, holds: Callable[[int], bool], loss: Any) -> dict[str, Any]:
        """Return the dictionaries of a module with the loss and the layers for which `holds`.

        The keys are the names of an nn.Module's own dictionaries, such as `_modules`.

        Raises:
            ConfigError: a layer, or a child of the model, has the name of the loss.
        """
        children = {s.name: s.module for s in self.steps if holds(s.index)}
        registered = {CHILDREN: children} if self.model is None else registered_of(self.model)
        return with_loss(registered, CHILDREN, loss)

    def elsewhere(self, holds: Callable[[int], bool]) -> tuple[str, ...]:
        """Return the paths of the layers that only other processes run."""
        own = {step.path for step in self.steps if holds(step.index)}
        return tuple(step.path for step in self.steps if step.path not in own)

    @property
    def own_loss(self) -> Callable[[Any, Any], Tensor] | None:
        """The function that reads the loss from a model's own output; None for a list."""
        return None if self.model is None else output_loss

    def places(self) -> list[tuple[dict[str, Any], str, Any]]:
        """List the parameters and blocks that must not be replaced: (dictionary, name, object)."""
        if self.model is None:
            return []
        places: list[tuple[dict[str, Any], str, Any]] = []
        for module in self.model.modules():
            places += [(parameters_of(module), n, p) for n, p in parameters_of(module).items()]
        for step in self.steps:
            path, _, last = step.path.rpartition(".")
            places.append((children_of(self.model.get_submodule(path)), last, step.module))
        return places

    def holders(self) -> list[tuple[str, nn.Module]]:
        """List the modules of all parameters and buffers, each with the prefix of their names."""
        if self.model is not None:
            return [("", self.model)]
        return [(f"{step.path}.", step.module) for step in self.steps]

    @property
    def modules(self) -> list[nn.Module]:
        """The modules of the layers, and the model whose forward calls them."""
        of_layers = [step.module for step in self.steps]
        return of_layers if self.model is None else [*of_layers, self.model]


def _shared(
    one: tuple[Step, str], other: tuple[Step, str], stage_of: Sequence[int]
) -> PartitionError:
    (first, first_name), (step, name) = one, other
    return PartitionError(
        f"layers {first.label} on stage {stage_of[first.index]} and {step.label} on stage "
        f"{stage_of[step.index]} share one tensor ({first.name}.{first_name} is "
        f"{step.name}.{name}). Choose a partition that keeps layers {first.index} to "
        f"{step.index} on one stage, or untie them. Stages share parameters, not buffers, of a "
        "model that is captured: penstock.capture(model, example_inputs)"
    )
