"""Tables 2 and 3 of the paper: what more devices and more micro-batches bring."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from penstock import Cluster

from .cells import Cell
from .cuts import Cut, as_many_blocks, by_flops, by_least_variance
from .models import Subject, amoebanet, transformer
from .paper_step import Setting, Step
from .published import THROUGHPUT_GPU, THROUGHPUT_TPU

Key = tuple[int, int]
"""K and M."""
TABLE_2, OVER_K_2, TABLE_3 = "2: TPU", "2, over K = 2", "3: GPU"
_M_32 = 32
_AMOEBANET_SIZES_2 = (4, 8, 32, 64, 128, 256)
_AMOEBANET_SIZES_3 = (2, 4, 8, 16)


@dataclass(frozen=True)
class Guess:
    """What a row of a table was measured with: what the paper and its code say, or may have been.

    With a `batch_size` a step has so many samples, whatever M is, else `microbatch_size` for each
    micro-batch.
    """

    subject: Subject
    cluster: Cluster
    cut: Cut
    counted: tuple[int, ...]
    batch_size: int | None = None
    microbatch_size: int = 1

    def step(self, key: Key) -> Step:
        """Predict a step of K partitions and M micro-batches."""
        num_stages, num_microbatches = key
        samples = self.batch_size or self.microbatch_size * num_microbatches
        profile = self.subject.profile(self.counted)
        size = -(-samples // num_microbatches)
        partition = self.cut(profile, num_stages, self.cluster, size)
        return Step(Setting(profile, self.cluster, partition, num_microbatches, samples))

    def throughput(self, keys: Sequence[Key]) -> dict[Key, float]:
        """Return samples a second of each."""
        return {key: self.step(key).samples_per_s for key in keys}


def transformer_guesses(num_blocks: int, cluster: Cluster) -> list[Guess]:
    """One sample in a micro-batch and the head in the last partition, as in the published
    configuration; or 32 samples in a step; or the head and the loss outside of the pipeline.
    """
    whole, headless = transformer(num_blocks), transformer(num_blocks, has_head=False)
    guess = Guess(whole, cluster, as_many_blocks, (1, 8, 32))
    return [
        guess,
        replace(guess, batch_size=32),
        replace(guess, subject=headless),
        replace(guess, subject=headless, batch_size=32),
    ]


def amoebanet_guesses_2(cluster: Cluster, other: Cluster) -> list[Guess]:
    """Table 1's batch of 128 and the code's cut by FLOPs; or 256, the cut of the paper's text, or
    the other kind of TPU.
    """
    guess = Guess(amoebanet(18, 256), cluster, by_flops, _AMOEBANET_SIZES_2, 128)
    return [
        guess,
        replace(guess, batch_size=256),
        replace(guess, cut=by_least_variance),
        replace(guess, cluster=other),
    ]


def amoebanet_guesses_3(cluster: Cluster) -> list[Guess]:
    """Table 1's batch of 128, so 4 samples in a micro-batch, and the code's cut by FLOPs; or 2 to
    16 samples, or the cut of the paper's text.
    """
    sizes = _AMOEBANET_SIZES_3
    guess = Guess(amoebanet(18, 128), cluster, by_flops, sizes, microbatch_size=4)
    others = (replace(guess, microbatch_size=size) for size in sizes if size != 4)
    return [guess, *others, replace(guess, cut=by_least_variance)]


Predicted = Sequence[Mapping[Key, float]]
"""Samples a second of each guess; the first one's counts."""


def cells_of(
    table: str,
    model: str,
    published: Mapping[Key, float],
    predicted: Predicted,
    targets: Mapping[Key, float],
) -> list[Cell]:
    """Return the cells of one model in a table; all count over the first."""
    first = next(iter(published))
    over = [{key: each[key] / each[first] for key in published} for each in predicted]
    return [
        Cell(
            table=table,
            model=model,
            what=f"K = {key[0]}, M = {key[1]}",
            published=number,
            predicted=over[0][key],
            others=() if key == first else [each[key] for each in over[1:]],
            target=targets.get(key),
        )
        for key, number in published.items()
    ]


def table_2(
    guesses: Sequence[Guess], targets: Mapping[Key, float], target_m_32: float
) -> list[Cell]:
    """Return a row of table 2, and what its last line is over K = 2 of that line."""
    model = guesses[0].subject.name
    published = THROUGHPUT_TPU[model]
    predicted = [guess.throughput(list(published)) for guess in guesses]
    base = published[2, _M_32]
    last = {key: number / base for key, number in published.items() if key[1] == _M_32}
    return [
        *cells_of(TABLE_2, model, published, predicted, targets),
        *cells_of(OVER_K_2, model, last, predicted, dict.fromkeys(list(last)[1:], target_m_32)),
    ]


def table_3(guesses: Sequence[Guess], target: float) -> list[Cell]:
    """Return a row of table 3."""
    model = guesses[0].subject.name
    published = THROUGHPUT_GPU[model]
    predicted = [guess.throughput(list(published)) for guess in guesses]
    targets = dict.fromkeys(list(published)[1:], target)
    return cells_of(TABLE_3, model, published, predicted, targets)


def transformers() -> list[Cell]:
    """Return the Transformers of both tables."""
    tpu, gpu = Cluster.load("tpu-v3-8"), Cluster.load("p100-pcie-8")
    return [
        *table_2(transformer_guesses(48, tpu), {(4, 1): 0.10, (8, 1): 0.10}, 0.08),
        *table_3(transformer_guesses(24, gpu), 0.12),
    ]


def amoebanets() -> list[Cell]:
    """Return the AmoebaNets of both tables."""
    tpu, other = Cluster.load("tpu-v2-8"), Cluster.load("tpu-v3-8")
    return [
        *table_2(amoebanet_guesses_2(tpu, other), {}, 0.18),
        *table_3(amoebanet_guesses_3(Cluster.load("p100-pcie-8")), 0.18),
    ]
