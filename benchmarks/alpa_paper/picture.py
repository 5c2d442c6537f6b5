"""A plan on sub-meshes as a picture: layers by the devices of their stages, coloured by cuts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

from penstock.planner.make_plan import Choice
from penstock.planner.mesh_task import MeshTask
from penstock.planner.plan_page import DrawnLayer, drawn_layers
from penstock.planner.plan_sharding import sharding_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """Layers in order, and how many devices each stage has."""

    title: str
    layers: Sequence[DrawnLayer]
    sizes: Sequence[int]

    @classmethod
    def of(cls, title: str, task: MeshTask, choice: Choice) -> "Picture":
        """Return the picture of a plan."""
        plan = choice.plan
        graph = task.graph_of(plan.num_microbatches)
        sharding = None if plan.sharding is None else sharding_of(plan, graph, task.names)
        layers = drawn_layers(plan, graph, task.names, sharding)
        return cls(title, layers, [len(ranks[0]) for ranks in plan.placement.ranks])

    def draw(self, figure: "Figure") -> None:
        """Draw a row of devices for each stage, from the first one down."""
        axes = figure.add_subplot()
        tops = [*accumulate(self.sizes, initial=0)]
        kinds = dict.fromkeys(layer.cuts for layer in self.layers)
        for number, cuts in enumerate(kinds):
            own = [n for n, layer in enumerate(self.layers) if layer.cuts == cuts]
            stages = [self.layers[n].stage for n in own]
            axes.bar(
                own,
                [self.sizes[stage] for stage in stages],
                bottom=[tops[stage] for stage in stages],
                width=1.0,
                label=cuts,
                color=f"C{number}",
                edgecolor="white",
            )
        names = [layer.name for layer in self.layers]
        axes.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
        axes.set_yticks(tops)
        axes.set_ylim(tops[-1], 0)
        axes.set_ylabel("devices")
        axes.set_title(f"{self.title}: weights of each layer are", fontsize=9)
        figure.legend(loc="outside right upper", fontsize=7)
