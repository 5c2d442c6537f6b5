"""From which checkpoint a run may go on."""

from pathlib import Path

from penstock.checkpoint.files import read_facts, read_state
from penstock.errors import CheckpointError
from penstock.recipe.read import check_same_run
from penstock.recipe.recipe import Recipe

from .run_folder import RunFolder


def check_state(checkpoint: Path, recipe: Recipe) -> None:
    """Refuse a checkpoint of another run before anything is loaded.

    Raises:
        CheckpointError: it is damaged, or was not saved by a run.
        RunFolderError: it was saved by a run of another recipe.
    """
    state = read_state(checkpoint)[0]["state"]
    missing = [name for name in ("position", "recipe", "scaler") if name not in state]
    if missing:
        raise CheckpointError(
            f"{checkpoint} was not saved by `penstock train`: it has no {missing[0]}"
        )
    check_same_run(state["recipe"], recipe, checkpoint)


def way_out(folder: RunFolder) -> str:
    """Say what can be done about a newest checkpoint that cannot be loaded."""
    *before, newest = folder.checkpoints()
    number = next((n for n in reversed(range(len(before))) if _is_sound(before[n])), None)
    if number is None:
        return (
            f"No other checkpoint in {folder.path} is sound. If there is a copy of this one, put "
            f"it back; else the run can only begin again at step 0, which deleting {newest} does"
        )
    doomed = ", ".join(str(path) for path in (*before[number + 1 :], newest))
    return f"To resume from {before[number]}, delete {doomed}"


def _is_sound(checkpoint: Path) -> bool:
    try:
        read_facts(checkpoint)
    except CheckpointError:
        return False
    return True
