"""ZeRO, stage 1: replicas of a stage share out the state of its optimizer.

    train_step     gradients of all parameters, the same on every replica
    step           each replica steps its share of the parameters ──► its twins copy them

A parameter's state lives on one replica.  Torch's ZeroRedundancyOptimizer is not used: it refuses
a stage without parameters or with two types of them, sends one parameter at a time, which is slow
for many small ones, and computes and waits in one call, so that an error in computing would pass
for a connection that broke.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.errors import ConfigError, shown
from penstock.mesh import Mesh
from penstock.runtime.engine import check_pipeline
from penstock.runtime.replicas import cut_into_buckets

if TYPE_CHECKING:
    from penstock.pipeline import Pipeline

Group = dict[str, Any]


def zero_optimizer(
    pipe: "Pipeline",
    optimizer_class: Callable[..., Optimizer],
    params: Iterable[Tensor] | Iterable[Group] | None = None,
    **options: Any,
) -> Optimizer:
    """Make an optimizer whose state is shared out over the replicas of the mesh.

        optimizer = penstock.zero_optimizer(pipe, torch.optim.AdamW, lr=1e-3)

    It is used like any other, with learning-rate schedulers, `penstock.clip_grad_norm_` and
    `penstock.GradScaler`, and gives the same bits as `optimizer_class(pipe.parameters(),
    **options)` with as many replicas.  Without replicas it is just that.  A stage without
    parameters gets an optimizer too.

    With replicas every process calls this, and later `step`, as all others do.  Each holds the
    state of about 1 / num_replicas of its stage's parameters; `state_dict` gives that share, and
    `load_state_dict` takes a share or the whole.

    Args:
        pipe: whose parameters it steps.
        optimizer_class: treats each parameter on its own, as Adam and SGD do (L-BFGS does not).
        params: parameters or parameter groups, as torch's optimizers take them; default: all of
            `pipe`.
        options: what `optimizer_class` takes beside the parameters.

    Raises:
        ConfigError: `optimizer_class` is none, `params` are no parameters, or they differ between
            replicas.
        MeshError: the others do something else, or make the optimizer of another pipeline.
    """
    check_pipeline(pipe)
    if isinstance(optimizer_class, Optimizer) or not callable(optimizer_class):
        raise ConfigError(
            f"optimizer_class={shown(optimizer_class)}; give the class, such as "
            "torch.optim.AdamW, and its options by name: each replica makes one of its share"
        )
    groups = _as_groups(pipe.parameters() if params is None else params)
    mesh = pipe.mesh
    if mesh.shards.size > 1:
        raise ConfigError(
            f"zero_optimizer shares state out over replicas, and this mesh has {mesh.shards.size} "
            "shards, which share the weights already; use the optimizer's own class"
        )
    if mesh.num_replicas == 1:
        return optimizer_class(groups, **options)
    with mesh.reporting():
        return ShardedOptimizer(pipe.number, mesh, partial(optimizer_class, **options), groups)


def is_sharded(optimizer: Optimizer) -> bool:
    """Tell whether this process holds the state of a share of the parameters only."""
    return isinstance(optimizer, ShardedOptimizer)


def share_of(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer of this process's share, with the options of the whole one, to be read;
    one that is not sharded is its own share.
    """
    return optimizer.share if isinstance(optimizer, ShardedOptimizer) else optimizer


class ShardedOptimizer(Optimizer):
    """An optimizer of all parameters of a stage that holds the state of a share of them.

    `param_groups` hold all parameters; their options are what counts.
    """

    def __init__(
        self,
        pipeline: int,
        mesh: Mesh,
        make: Callable[[list[Group]], Optimizer],
        groups: list[Group],
    ) -> None:
        self._pipeline, self._mesh = pipeline, mesh
        self._owners: dict[Tensor, int] = {}
        self._loads_bytes = [0] * mesh.num_replicas
        self._share: Optimizer | None = None
        self._require_same(groups)
        share = make([self._mine(group) for group in groups])
        super().__init__(groups, share.defaults)
        self._share, self.state = share, share.state
        _copy_options(share.param_groups, self.param_groups)

    @property
    def share(self) -> Optimizer:
        """The optimizer of the parameters that this replica steps."""
        assert self._share is not None
        _copy_options(self.param_groups, self._share.param_groups)
        return self._share

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, and give each replica its share of it; all processes call this alike."""
        super().add_param_group(param_group)
        if self._share is not None:  # or torch's constructor is at work
            with self._mesh.reporting():
                self._require_same(self.param_groups[-1:])
                self._share.add_param_group(self._mine(self.param_groups[-1]))

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the own share, and take over what the other replicas stepped.

        Raises:
            MeshError: the others do something else, or step the optimizer of another pipeline.
            PeerError: another process failed, or is gone.
            WaitTimeout: the other replicas do not step within the deadline.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._mesh.world.begin_call("step of zero_optimizer", self._pipeline)
        with self._mesh.reporting():
            share = self.share
            share.step()
            _copy_options(share.param_groups, self.param_groups)  # some count steps there
        self.state = share.state
        with torch.no_grad():
            for replica in range(self._mesh.num_replicas):
                for bucket in cut_into_buckets(list(self._stepped(replica))):
                    self._spread(bucket, replica)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the options of all parameters, and the state of those that this replica steps.

        The share loads its state in the way of its own class, which may keep types that torch
        would round.
        """
        saved_groups: list[Group] = state_dict["param_groups"]
        super().load_state_dict({**state_dict, "state": {}})
        share, groups = self.share, []
        for group, saved in zip(self.param_groups, saved_groups, strict=True):
            pairs = zip(group["params"], saved["params"], strict=True)
            own = [number for p, number in pairs if self._owners[p] == self._mesh.replica]
            groups.append({**saved, "params": own})
        numbers = {number for group in groups for number in group["params"]}
        state = {n: of for n, of in state_dict["state"].items() if n in numbers}
        share.load_state_dict({"state": state, "param_groups": groups})
        self.state = share.state

    def _mine(self, group: Group) -> Group:
        """Share out a group's parameters, the largest first; those that are frozen come last."""
        for parameter in sorted(group["params"], key=lambda p: (not p.requires_grad, -_bytes(p))):
            owner = self._loads_bytes.index(min(self._loads_bytes))
            self._loads_bytes[owner] += _bytes(parameter)
            self._owners[parameter] = owner
        own = [p for p in group["params"] if self._owners[p] == self._mesh.replica]
        return {**group, "params": own}

    def _stepped(self, replica: int) -> Iterator[Tensor]:
        for group in self.param_groups:
            for parameter in group["params"]:
                changes = parameter.requires_grad or parameter.grad is not None
                if changes and parameter.numel() and self._owners[parameter] == replica:
                    yield parameter

    def _spread(self, parameters: list[Tensor], replica: int) -> None:
        """Copy the parameters of one type that `replica` stepped to its twins."""
        is_mine = replica == self._mesh.replica
        sizes = [parameter.numel() for parameter in parameters]
        first = parameters[0]
        if is_mine:
            flat = torch.cat([parameter.reshape(-1) for parameter in parameters])
        else:
            flat = torch.empty(sum(sizes), dtype=first.dtype, device=first.device)
        self._mesh.replicas.tensors.broadcast(
            replica, flat, "for the parameters that the other replicas step"
        )
        if not is_mine:
            for parameter, part in zip(parameters, flat.split(sizes), strict=True):
                parameter.copy_(part.view(parameter.shape))

    def _require_same(self, groups: list[Group]) -> None:
        """See that all replicas are given the same: they share it out each for itself."""
        mine = [
            [(tuple(p.shape), str(p.dtype), p.requires_grad) for p in group["params"]]
            for group in groups
        ]
        self._mesh.world.begin_call("zero_optimizer", self._pipeline)
        everyone = self._mesh.replicas.gather(
            mine, "for the other replicas to make the same optimizer"
        )
        for replica, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                counts = [sum(map(len, said)) for said in (everyone[0], theirs)]
                raise ConfigError(
                    f"replica 0 gives the optimizer of its rank {self._mesh.stage} {counts[0]} "
                    f"parameters, replica {replica} gives it {counts[1]}, or others, or others of "
                    "them frozen, or in other groups; give it the same on every replica"
                )


def _as_groups(params: Iterable[Tensor] | Iterable[Group]) -> list[Group]:
    """Write parameters as groups, which may be empty where a list of parameters may not."""
    given: list[Any] = list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    groups = [{**group, "params": _as_list(group["params"])} for group in groups]
    for group in groups:
        for parameter in group["params"]:
            if not isinstance(parameter, Tensor):
                raise ConfigError(
                    f"params hold a {type(parameter).__name__}; give parameters, or dicts with "
                    "parameters under 'params', as torch's optimizers take them"
                )
    return groups


def _as_list(params: Any) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _bytes(parameter: Tensor) -> int:
    return parameter.numel() * parameter.element_size()


def _copy_options(source: list[Group], target: list[Group]) -> None:
    """Copy to `target` all that `source` says beside the parameters, learning rates and such."""
    for given, group in zip(source, target, strict=True):
        group.update({name: value for name, value in given.items() if name != "params"})
