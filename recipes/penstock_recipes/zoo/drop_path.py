"""Drop-path: whole branches are left out at random in training, each for some examples."""

from torch import Tensor, nn

from penstock.errors import ConfigError


class DropPath(nn.Module):
    """Replace some examples of a branch by zeros, and divide the others by the chance to be kept.

    In training each example is dropped with the chance `rate * progress`, whatever the others
    are; in evaluation the input is given as it is.  (B, ...) -> (B, ...).

    The chance may rise during training, as in ScheduledDropPath (Zoph et al. 2018, section 3):
    see `set_drop_path_progress`.  With nothing set it is `rate` from the first step on.

    Raises:
        ConfigError: `rate` is no number from 0 to below 1.
    """

    progress: float
    """How much of `rate` holds now, from 0 to 1."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ConfigError(
                f"drop-path rate {rate}: it is the chance that a branch is dropped, from 0 to "
                "below 1 (papers that give the chance to keep it mean 1 minus that)"
            )
        self.rate, self.progress = rate, 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Drop some examples, in training.

        A module with a rate draws random numbers at progress 0 too, where it drops nothing: so
        a layer that draws does so from its first step on.
        """
        if not self.training or self.rate == 0:
            return x
        keep = 1 - self.rate * self.progress
        mask = x.new_empty(x.shape[0], *(1 for _ in x.shape[1:])).bernoulli_(keep)
        return x * mask.div_(keep)

    def extra_repr(self) -> str:
        """Show the rate at the end."""
        return f"rate={self.rate}"


def set_drop_path_progress(model: nn.Module, progress: float) -> None:
    """Say how far training is, from 0 to 1: the chance to drop a branch grows in proportion.

    It is the same for every `DropPath` in the model, at whatever depth: ScheduledDropPath as
    AmoebaNet's public code has it by default ("v1").  Variants of that code that also scale by
    the cell's depth ("v2", "v3") have no use here.

    To be called before each step, and after a run has been resumed: no checkpoint holds it.

    Raises:
        ConfigError: `progress` is no number from 0 to 1.
    """
    if not 0 <= progress <= 1:
        raise ConfigError(
            f"progress {progress}: give the share of all training steps that are done, from 0 to 1"
        )
    for module in model.modules():
        if isinstance(module, DropPath):
            module.progress = progress
