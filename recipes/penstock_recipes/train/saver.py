"""Save the checkpoints of a run while it trains; keep the newest few, and the best one."""

import json
from dataclasses import asdict

import torch

from penstock import Pipeline, async_save_checkpoint
from penstock.checkpoint import Saving
from penstock_recipes.recipe.recipe import Recipe

from .position import Position
from .run_files import BEST
from .run_folder import RunFolder
from .tasks.task import Measure


class Saver:
    """Saves one checkpoint at a time; `main` is the measure that decides which is best."""

    def __init__(
        self,
        recipe: Recipe,
        pipe: Pipeline,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler,
        main: Measure,
    ) -> None:
        self._recipe, self._main = recipe, main
        self._pipe, self._optimizer, self._scaler = pipe, optimizer, scaler
        self._saving: tuple[Saving, Position] | None = None

    def save(self, folder: RunFolder, position: Position) -> None:
        """Start saving a checkpoint; training continues meanwhile."""
        self.settle(folder)
        saving = async_save_checkpoint(
            folder.checkpoint_path(position.step),
            self._pipe,
            self._optimizer,
            position=asdict(position),
            recipe=self._recipe.model_dump(),
            scaler=self._scaler.state_dict(),
        )
        self._saving = saving, position

    def settle(self, folder: RunFolder) -> None:
        """Wait for the current save, then delete the checkpoints that it replaces."""
        if self._saving is None:
            return
        (saving, position), self._saving = self._saving, None
        saving.wait()
        # The best so far is saved by now: each is saved when its epoch ends.
        best = position.best
        if best is not None:
            place = folder.checkpoint_path(best.step).relative_to(folder.path)
            facts = {"checkpoint": str(place), "measure": self._main.name, **asdict(best)}
            folder.write_text(BEST, json.dumps(facts) + "\n")
        section = self._recipe.train  # windows end at any step
        interval = section.checkpoint_every if section.window == 1 else 1
        kept = None if best is None else best.step
        folder.keep_newest(section.keep_checkpoints, interval, kept)
