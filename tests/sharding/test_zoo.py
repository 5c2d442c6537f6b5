"""Every member of the zoo on stages of unlike meshes is the unsplit model, but for rounding."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

import penstock
from penstock import Mesh
from penstock.planner.placement import Placement
from penstock.schedules import eager_1f1b, gpipe, one_f_one_b, zb_h1
from tests.distributed.call import call
from tests.recipes.zoo_members import ZOO_MEMBERS

MESHES = {
    "1 + 2": (((0,),), ((1, 2),)),
    "2 + 1": (((0, 1),), ((2,),)),
    "2 + 2": (((0, 1),), ((2, 3),)),
    "1 + 2 + 1": (((0,),), ((1, 2),), ((3,),)),
}
ROUNDING = {"amoebanet": 1e-10}
"""By the beginning of a name; its gradients move by 1e-11 where its inputs do by 1e-15."""
PLANS = {"gshard_moe": "expert", "wide_resnet": "auto", "resnet": "auto"}
"""By the beginning of a name; all others are divided by samples."""


def doubled(value: Any) -> Any:
    return tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t, value)


def loss(output: Any, targets: Tensor) -> Tensor:
    """Weigh all that the model gives."""
    leaves = [leaf for leaf in tree_leaves(output) if leaf.is_floating_point()]
    found: Tensor = sum((leaf * leaf.cos()).mean() for leaf in leaves) + 0.0 * targets.sum()
    return found


def checked(mesh: Mesh, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for n, name in enumerate(names):
        torch.manual_seed(0)
        model, inputs = ZOO_MEMBERS[name]()
        inputs = tree_map_only(Tensor, lambda t: t[:8], doubled(inputs))  # so that slices are even
        plan = next((plan for key, plan in PLANS.items() if name.startswith(key)), "data")
        report = penstock.check(
            model.double(),
            inputs,
            torch.zeros(8, dtype=torch.float64),
            loss=loss,
            num_microbatches=4,
            mesh=mesh,
            sharding=plan,
            schedule=(one_f_one_b, gpipe, eager_1f1b, zb_h1())[n % 4],
        )
        close = next((own for key, own in ROUNDING.items() if name.startswith(key)), 1e-12)
        found[name] = report.most < close, str(report)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("meshes", MESHES)
def test_the_zoo_on_unlike_meshes_is_the_unsplit_model(meshes: str, tmp_path: Path) -> None:
    turn = list(MESHES).index(meshes)
    names = [name for n, name in enumerate(ZOO_MEMBERS) if n % len(MESHES) == turn]
    placement = Placement(MESHES[meshes], ("cpu",) * len(MESHES[meshes]))
    for found in call(checked, placement, tmp_path, timeout_s=500.0, names=names):
        assert found.keys() == set(names)
        off = [text for is_close, text in found.values() if not is_close]
        assert not off, "\n".join(off)
