"""The vocabulary that is kept beside a run: without it, its weights mean nothing."""

from pathlib import Path

from penstock.data.text import Vocabulary
from penstock.errors import CheckpointError

VOCABULARY = "vocabulary.json"


def check_vocabulary(vocabulary: Vocabulary, folder: Path) -> None:
    """See that the weights of the run in `folder` are of this vocabulary.

    Raises:
        CheckpointError: they are of another one, or of nobody knows which.
    """
    kept = folder / VOCABULARY
    if not kept.is_file():
        raise CheckpointError(
            f"{kept} is not there, so that nobody knows what the weights' tokens mean; put the "
            "vocabulary of that run beside its checkpoints"
        )
    other = Vocabulary.load(kept)
    vocabulary.check_fits(size=other.size, digest=other.digest)
