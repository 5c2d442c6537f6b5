"""The recipe of the digits at a size at which tests train it: three steps an epoch."""

from penstock_recipes.recipe.cookbook import find_recipe

DIGITS = find_recipe("digits")
SMALL = ("model.num_blocks=1", "model.width=4", "train.batch_size=500")
"""The last of the three steps is smaller."""
TWO_EPOCHS = (
    *SMALL,
    "train.epochs=2",
    "train.log_every=1",
    "train.checkpoint_every=2",
    "train.keep_checkpoints=9",
    "learning_rate.warmup_epochs=1",
)
NUM_STEPS = 6
"""Of two epochs."""
