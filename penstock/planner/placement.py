"""Say which ranks run which stage: the only place where ranks are counted.

    K = 3 stages, one to a rank, D = 2 replicas:      stage        0   1   2
                                                      replica 0    0   1   2
                                                      replica 1    3   4   5

Stages that talk to each other are neighbours in rank, and so mostly on one host.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import PlanError

REPLICA, STAGE, SHARD = "replica", "stage", "shard"
"""The axes: copies of the pipeline, the ranks of one copy, the ranks that share a stage."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The ranks that run each stage, by axis, and the device of each stage.

    `ranks[stage][replica][shard]` is a rank: a process, or a thread where one process runs all.
    `devices[stage]` names a device as torch does; between processes its kind counts, and each
    process uses its own device of that kind.

    `cluster_places[rank]` is the number of the cluster's device that the rank was planned for:
    start the processes in that order of hosts and devices.  None: rank r is on device r.
    """

    ranks: tuple[tuple[tuple[int, ...], ...], ...]
    devices: tuple[str, ...]
    cluster_places: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse ranks that no job could have.

        Raises:
            PlanError: stages differ in their replicas, or ranks are left out or mixed up.
        """
        if not self.ranks or not self.ranks[0]:
            raise PlanError("a placement needs at least one stage, and a replica of it")
        shapes = {tuple(map(len, of_stage)) for of_stage in self.ranks}
        if len(shapes) > 1 or 0 in min(shapes) or len(set(min(shapes))) > 1:
            raise PlanError("in a placement every stage has as many replicas and shards")
        if len(self.devices) != len(self.ranks):
            raise PlanError(
                f"{len(self.devices)} devices for {len(self.ranks)} stages; give one per stage"
            )
        if self.cluster_places is not None and len(self.cluster_places) != self.num_ranks:
            raise PlanError(
                f"a placement of {self.num_ranks} ranks has cluster_places for "
                f"{len(self.cluster_places)}; give one for each rank, or none"
            )
        of_replicas = [self.peers_in(replica) for replica in range(self.num_replicas)]
        every = {rank for ranks in of_replicas for rank in ranks}
        if min(every) < 0 or len(every) != sum(map(len, of_replicas)):
            raise PlanError(
                f"a placement has ranks {sorted(every)}; they count from 0, and each belongs to "
                "one replica"
            )

    @classmethod
    def of(
        cls, places: Sequence[int], num_replicas: int = 1, devices: Sequence[str] = ()
    ) -> "Placement":
        """Place stages: `places[stage]` is the rank of a stage in replica 0, the next replica
        begins where that ends, and so on.
        """
        width = 1 + max(places)
        ranks = tuple(
            tuple((replica * width + place,) for replica in range(num_replicas))
            for place in places
        )
        return cls(ranks, tuple(devices) or ("cpu",) * len(ranks))

    @property
    def num_stages(self) -> int:
        """K."""
        return len(self.ranks)

    @property
    def num_replicas(self) -> int:
        """D."""
        return len(self.ranks[0])

    @property
    def num_ranks(self) -> int:
        """Ranks of all replicas together."""
        return 1 + max(rank for of_stage in self.ranks for row in of_stage for rank in row)

    @property
    def num_places(self) -> int:
        """Ranks of one replica."""
        return 1 + max(self.places)

    @property
    def places(self) -> tuple[int, ...]:
        """The place of each stage among the ranks of a replica: its rank in a schedule."""
        return tuple(of_stage[0][0] for of_stage in self.ranks)

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
        replicas = range(self.num_replicas)
        return next(r for r in replicas if any(rank in of_stage[r] for of_stage in self.ranks))

    def place_of(self, rank: int) -> int:
        """Return the place of `rank` among the ranks of its replica: its rank in a schedule."""
        return self.places[self.stages_of(rank)[0]]

    def peers_in(self, replica: int) -> tuple[int, ...]:
        """Return the ranks of a replica, in order."""
        found = {rank for of_stage in self.ranks for rank in of_stage[replica]}
        return tuple(sorted(found))

    def peers(self, rank: int, axis: str) -> tuple[int, ...]:
        """Return the ranks along an axis through `rank`, itself included, in order."""
        replica = self.replica_of(rank)
        if axis == STAGE:
            return self.peers_in(replica)
        of_stage = self.ranks[self.stages_of(rank)[0]]
        if axis == SHARD:
            return of_stage[replica]
        shard = of_stage[replica].index(rank)
        return tuple(row[shard] for row in of_stage)

    @property
    def names(self) -> list[str]:
        """What each rank runs, for messages."""
        return [self.name_of(rank) for rank in range(self.num_ranks)]

    def name_of(self, rank: int) -> str:
        """Name what `rank` runs, for messages: "stages 0 and 2 of replica 1"."""
        stages = self.stages_of(rank)
        which = f" of replica {self.replica_of(rank)}" if self.num_replicas > 1 else ""
        return f"stage{'s' if len(stages) > 1 else ''} {' and '.join(map(str, stages))}{which}"
