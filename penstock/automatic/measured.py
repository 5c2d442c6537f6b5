"""What layers take on the device they are on, by what a roofline says of it: a factor for each.

a layer, whole, on one device    measured  =  factor x roofline
a part of it on a mesh                        factor x roofline of the part  +  collectives
"""

from dataclasses import replace
from functools import cache, partial
from typing import Any

from torch import Tensor

from penstock.costs.cluster import Cluster
from penstock.costs.measuring.measure import How, measure
from penstock.errors import ConfigError
from penstock.model.layers import Layers
from penstock.model.pytree import flatten
from penstock.runtime.microbatches import first_microbatch
from penstock.runtime.planning import StageCalls
from penstock.sharding.costs import Costs
from penstock.sharding.program import whole_s
from penstock.trace.progress import saying
from penstock.trace.units import count_text

from .choose import MeshTask


def check_measurable(layers: Layers, inputs: Any, cluster: Cluster | None) -> None:
    """Refuse to measure what cannot run, or runs on another kind of device than is planned for."""
    modules = (step.module for step in layers)
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    tensors += [leaf for leaf in flatten(inputs)[0] if isinstance(leaf, Tensor)]
    kinds = sorted({tensor.device.type for tensor in tensors})
    wanted = kinds[0] if cluster is None else cluster.device_of(0).torch_type
    if kinds != [wanted] or wanted == "meta":
        raise ConfigError(
            f"measure=True runs the layers where they are, and model and inputs are on "
            f"{' and '.join(kinds)}; give both on {'one device' if cluster is None else wanted}, "
            "or measure=False, by which seconds are estimated"
        )


def with_measured(task: MeshTask, layers: Layers, inputs: Any, num_threads: int = 1) -> MeshTask:
    """Return a task for which layers are measured here, on the cluster's first device and with as
    many threads as a stage has, once for each number of micro-batches.
    """
    check_measurable(layers, inputs, task.cluster)
    return replace(task, factors_of=cache(partial(_factors, task, layers, inputs, num_threads)))


def _factors(
    task: MeshTask, layers: Layers, inputs: Any, num_threads: int, num_microbatches: int
) -> tuple[float, ...]:
    """Return the seconds of each layer, forward and backward, by those of the roofline; of layers
    that are alike, the median.
    """
    part, graph = first_microbatch(inputs, num_microbatches), task.graph_of(num_microbatches)
    with saying(f"measuring {count_text(len(layers), 'layer')}"):
        found = measure(layers, part, How(threads=num_threads, call=StageCalls))
    costs, of_kind, factors = Costs((1,), task.cluster), dict[str, float](), list[float]()
    for n in range(len(layers)):
        own = found.seconds(n)
        known_s = of_kind.setdefault(graph.signature(n), whole_s(graph, n, costs))
        factors.append((own.forward_s + own.backward_s) / known_s if known_s else 1.0)
    return tuple(own or 1.0 for own in factors)
