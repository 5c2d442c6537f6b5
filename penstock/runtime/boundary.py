"""What may leave a stage."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from penstock.errors import BoundaryError
from penstock.model.pytree import Structure, opaque_values


def check_leaving(leaves: Sequence[Tensor], structure: Structure, stage: int, peer: int) -> None:
    """Refuse values that would not be the same on the other side of a cut.

    Raises:
        BoundaryError: a tensor has no batch dimension, or a tensor could hide in an object.
    """
    for value in opaque_values(structure):
        raise BoundaryError(
            f"a {type(value).__name__} leaves stage {stage} for stage {peer}; a tensor inside it "
            "would lose its gradient. Only tensors, numbers, strings, None, and tuples, lists, "
            "dicts and dataclasses of them cross stages: return one of those, or keep the layers "
            "that use it on one stage"
        )
    for leaf in leaves:
        if leaf.dim() == 0:
            raise BoundaryError(
                f"a tensor without a batch dimension (shape ()) leaves stage {stage} for stage "
                f"{peer}: a value reduced over a micro-batch is not what the whole batch would "
                "give. Return one value per sample, or a Python number, or keep its producer and "
                "its users on one stage"
            )


def check_routes(exported: Mapping[int, Sequence[Tensor]], stage: int) -> None:
    """Refuse one tensor that leaves under two names for two stages.

    Its gradients would come back on two ways and be added in another order than unsplit.

    Raises:
        BoundaryError: there is such a tensor.
    """
    seen: dict[int, int] = {}
    for peer, leaves in exported.items():
        for leaf in leaves:
            if leaf.requires_grad and seen.setdefault(id(leaf), peer) != peer:
                raise BoundaryError(
                    f"one tensor of shape {tuple(leaf.shape)} leaves stage {stage} under two "
                    f"names, for stages {peer} and {seen[id(leaf)]}, so its gradients would not "
                    "add up in the order of the unsplit model. Let both stages read one name, or "
                    "return a copy (x.clone()) under the second"
                )
