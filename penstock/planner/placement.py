"""The placement of stages: which ranks run each stage of each replica.

    K = 3 stages, one to a rank, D = 2 replicas:      stage        0   1   2
                                                      replica 0    0   1   2
                                                      replica 1    3   4   5

Consecutive stages have neighbouring ranks, and so are mostly on one host.  Each stage has a mesh,
replica x shard.  Meshes may differ, as 2 x 2 + 1 x 4:

                       stage 0      stage 1
                       0   1        4  5  6  7
                       2   3

The place of a stage along the pipeline is its rank in a schedule.  It need not follow the order of
ranks:

    stage_places        0     1   2        stage 0 on ranks 2 and 3, as on the second kind of host
    ranks             2  3    0   1
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from penstock.errors import PlanError

REPLICA, STAGE, SHARD = "replica", "stage", "shard"
"""The axes: copies of the pipeline, the ranks of one copy, the ranks that share a stage."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The ranks that run each stage, by axis, and the device of each stage.

    `ranks[stage][replica][shard]` is a rank: a process, or a thread where one process runs all.
    A rank may run several stages; these have the same mesh.
    `devices[stage]` names a device as torch does; between processes its kind counts, and each
    process uses its own device of that kind.

    `cluster_places[rank]` is the number of the cluster's device that the rank was planned for:
    start the processes in that order of hosts and devices.  None: rank r is on device r.

    `shard_shapes[stage]` are the lengths of the axes of its shards; neighbouring ranks differ
    along the last axis.  None: the shards of each stage are in a row.

    `stage_places[stage]` is the place of its mesh along the pipeline; None: in order of ranks.
    `idle` are ranks that take part in the job and run no stage.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    devices: tuple[str, ...]
    cluster_places: tuple[int, ...] | None = None
    shard_shapes: tuple[tuple[int, ...], ...] | None = None
    stage_places: tuple[int, ...] | None = None
    idle: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # 1. Check the shape: equal replicas on each stage, an entry for each stage in each list.
        if not self.ranks or not all(of_stage and of_stage[0] for of_stage in self.ranks):
            raise PlanError("a placement needs at least one stage, and a rank for each")
        for stage, of_stage in enumerate(self.ranks):
            if len(set(map(len, of_stage))) > 1:
                raise PlanError(
                    f"the replicas of stage {stage} of a placement have "
                    f"{list(map(len, of_stage))} shards; give each as many"
                )
        if len(self.devices) != len(self.ranks):
            raise PlanError(
                f"{len(self.devices)} devices for {len(self.ranks)} stages; give one per stage"
            )
        if self.cluster_places is not None and len(self.cluster_places) != self.num_ranks:
            raise PlanError(
                f"a placement of {self.num_ranks} ranks has cluster_places for "
                f"{len(self.cluster_places)}; give one for each rank, or none"
            )
        numbers = tuple(len(of_stage[0]) for of_stage in self.ranks)
        if self.shard_shapes is not None and tuple(map(prod, self.shard_shapes)) != numbers:
            raise PlanError(
                f"shard_shapes={self.shard_shapes}, and the stages have {numbers} shards; give "
                "each stage axes whose lengths multiply to that"
            )
        # 2. Check the order of meshes, and that each rank is in one mesh or idle.
        self._check_places()
        all_ranks = [*self.idle, *(rank for mesh in self.meshes for row in mesh for rank in row)]
        if min(all_ranks) < 0 or len(all_ranks) != len(set(all_ranks)):
            raise PlanError(
                f"a placement has ranks {sorted(all_ranks)}; they count from 0, and each belongs "
                "to one replica and one shard of the stages that it runs, or is idle"
            )

    def _check_places(self) -> None:
        """Check that `stage_places` has one place along the pipeline for each mesh."""
        if (places := self.stage_places) is None:
            return
        pairs = set(zip(places, self.ranks, strict=False))
        count = len(set(self.ranks))
        if (len(places), len(pairs), set(places)) != (len(self.ranks), count, {*range(count)}):
            raise PlanError(
                f"a placement has stage_places={tuple(places)}, and ranks {self.ranks}; give each "
                f"stage the place of its mesh, of {count} that count from 0, or leave them out"
            )

    @classmethod
    def of(
        cls,
        places: Sequence[int],
        num_replicas: int = 1,
        devices: Sequence[str] = (),
        num_shards: int | tuple[int, ...] = 1,
    ) -> "Placement":
        """Place stages on equal meshes: stage s at `places[s]` along the pipeline.

        Ranks are numbered replica by replica, then place by place, then shard by shard.  A tuple
        `num_shards` has the lengths of the shard axes.
        """
        shape = num_shards if isinstance(num_shards, tuple) else None
        num_shards = num_shards if isinstance(num_shards, int) else prod(num_shards)
        width = (1 + max(places)) * num_shards
        ranks = tuple(
            tuple(
                tuple(replica * width + place * num_shards + shard for shard in range(num_shards))
                for replica in range(num_replicas)
            )
            for place in places
        )
        shapes = None if shape is None else (shape,) * len(ranks)
        return cls(ranks, tuple(devices) or ("cpu",) * len(ranks), shard_shapes=shapes)

    def spread(self, places: Sequence[int], devices: Sequence[str]) -> "Placement":
        """Return the placement of other stages, each at one of the places of this one."""
        meshes = self.meshes
        ranks = tuple(meshes[place] for place in places)
        shapes = tuple(self.shard_axes_of(self.ranks.index(mesh)) for mesh in ranks)
        shard_shapes = None if self.shard_shapes is None else shapes
        stage_places = None if self.stage_places is None else tuple(places)
        return Placement(ranks, tuple(devices), None, shard_shapes, stage_places, self.idle)

    def among(self, num_ranks: int) -> "Placement":
        """Return the placement in a job of `num_ranks` processes, rank r on device r of the
        cluster.

        Processes without a stage are idle.
        """
        on = self.cluster_places or tuple(range(self.num_ranks))
        ranks = tuple(
            tuple(tuple(on[rank] for rank in row) for row in of_stage) for of_stage in self.ranks
        )
        idle = {*range(num_ranks)} - {rank for mesh in ranks for row in mesh for rank in row}
        is_in_order = on == tuple(sorted(on))
        return replace(
            self,
            ranks=ranks,
            cluster_places=None,
            stage_places=self.stage_places if is_in_order else self.places,
            idle=tuple(sorted(idle)),
        )

    @property
    def meshes(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """The meshes of all stages, `[replica][shard]`, each once, in order along the pipeline.

        Without `stage_places` that is the order of their first ranks.
        """
        if self.stage_places is None:
            return tuple(sorted(set(self.ranks)))
        pairs = {*zip(self.stage_places, self.ranks, strict=True)}
        return tuple(mesh for _, mesh in sorted(pairs))

    @property
    def is_regular(self) -> bool:
        """True if all stages have the same number of replicas and shards, and no rank is idle."""
        return len({(len(mesh), len(mesh[0])) for mesh in self.meshes}) == 1 and not self.idle

    @property
    def num_stages(self) -> int:
        """K."""
        return len(self.ranks)

    @property
    def num_replicas(self) -> int:
        """D, the number of replicas; raises PlanError if stages have different numbers."""
        numbers = {len(mesh) for mesh in self.meshes}
        if len(numbers) > 1:
            raise PlanError(f"stages of this placement have {sorted(numbers)} replicas")
        return numbers.pop()

    @property
    def most_shards(self) -> int:
        """The largest number of ranks that share a stage of a replica."""
        return max(len(mesh[0]) for mesh in self.meshes)

    @property
    def num_ranks(self) -> int:
        """The number of ranks of all stages, idle ones included."""
        busy = (rank for mesh in self.meshes for row in mesh for rank in row)
        return 1 + max((*self.idle, *busy))

    @property
    def num_places(self) -> int:
        """Meshes along the pipeline: ranks of a replica, where each is one."""
        return 1 + max(self.places)

    @property
    def places(self) -> tuple[int, ...]:
        """The place of each stage along the pipeline: its rank in a schedule."""
        if self.stage_places is not None:
            return self.stage_places
        if self.is_regular:  # by number: a place without a stage counts, too
            return tuple(of_stage[0][0] // self.most_shards for of_stage in self.ranks)
        return tuple(self.meshes.index(of_stage) for of_stage in self.ranks)

    def rank_of(self, stage: int, replica: int = 0, shard: int = 0) -> int:
        """Return the rank that runs `stage`."""
        return self.ranks[stage][replica][shard]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` runs."""
        return tuple(
            stage
            for stage, of_stage in enumerate(self.ranks)
            if any(rank in row for row in of_stage)
        )

    def replica_of(self, rank: int) -> int:
        """Return the replica that `rank` belongs to."""
        mesh = self._mesh_of(rank)
        return next(number for number, row in enumerate(mesh) if rank in row)

    def shard_of(self, rank: int) -> int:
        """Return which of the ranks that share its stages `rank` is."""
        return self._mesh_of(rank)[self.replica_of(rank)].index(rank)

    def place_of(self, rank: int) -> int:
        """Return the place of `rank` along the pipeline; idle ranks come after the last place."""
        stages = self.stages_of(rank)
        return self.places[stages[0]] if stages else self.num_places

    def peers_in(self, replica: int) -> tuple[int, ...]:
        """Return the ranks of a replica, in order; idle ranks belong to the first replica."""
        idle = () if replica else self.idle
        return tuple(sorted((*idle, *(rank for mesh in self.meshes for rank in mesh[replica]))))

    def peers(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the ranks along an axis through `rank`, itself included, in order.

        Along the stages these are the ranks of the same replica and shard.  If stages differ in
        shards, they are all ranks of the replica; if in replicas, all ranks.
        """
        mesh, replica, shard = self._mesh_of(rank), self.replica_of(rank), self.shard_of(rank)
        if axis == REPLICA:
            return tuple(row[shard] for row in mesh)
        if axis == SHARD:
            return mesh[replica]
        if self.is_regular:
            return tuple(sorted(other_mesh[replica][shard] for other_mesh in self.meshes))
        is_replicated = len({len(other_mesh) for other_mesh in self.meshes}) == 1
        return self.peers_in(replica) if is_replicated else tuple(range(self.num_ranks))

    def shard_axes_of(self, stage: int) -> tuple[int, ...]:
        """Return the lengths of the axes along which the shards of a stage are arranged."""
        row = (len(self.ranks[stage][0]),)
        return row if self.shard_shapes is None else self.shard_shapes[stage]

    @property
    def shard_axes(self) -> tuple[int, ...]:
        """Lengths of the shard axes of all stages; raises PlanError if stages differ."""
        axes = {self.shard_axes_of(stage) for stage in range(self.num_stages)}
        if len(axes) > 1:
            raise PlanError(f"stages of this placement have shards along axes of {sorted(axes)}")
        return axes.pop()

    def shard_lines(self, stage: int) -> list[list[tuple[int, ...]]]:
        """Return, for each axis of a stage's shards, all lines of ranks along it."""
        shape = self.shard_axes_of(stage)
        lines = []
        for axis, length in enumerate(shape):
            inner = prod(shape[axis + 1 :])
            numbers = [n for n in range(prod(shape)) if n // inner % length == 0]
            rows = [row for row in self.ranks[stage] for _ in numbers]
            firsts = numbers * len(self.ranks[stage])
            lines.append(
                [row[n : n + inner * length : inner] for row, n in zip(rows, firsts, strict=True)]
            )
        return lines

    def groups(self, axis: str) -> list[tuple[int, ...]]:
        """Return the ranks along an axis, for all ranks, each group once, in order."""
        return sorted({self.peers(rank, axis) for rank in range(self.num_ranks)})

    def _mesh_of(self, rank: int) -> tuple[tuple[int, ...], ...]:
        """Return the mesh of a rank; an idle rank is alone in its mesh."""
        meshes = (mesh for mesh in self.meshes if any(rank in row for row in mesh))
        return next(meshes, ((rank,),))

    @property
    def names(self) -> list[str]:
        """A name for each rank, for messages: the stages that it runs."""
        return [self.name_of(rank) for rank in range(self.num_ranks)]

    def name_of(self, rank: int) -> str:
        """Name what `rank` runs, for messages: "stages 0 and 2 of replica 1"."""
        stages = self.stages_of(rank)
        if not stages:
            return "no stage"
        mesh = self._mesh_of(rank)
        which = f" of replica {self.replica_of(rank)}" if len(mesh) > 1 else ""
        which += f", shard {self.shard_of(rank)}" if len(mesh[0]) > 1 else ""
        return f"stage{'s' if len(stages) > 1 else ''} {' and '.join(map(str, stages))}{which}"
