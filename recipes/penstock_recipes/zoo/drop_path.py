"""Drop-path: skip whole branches at random in training, for some samples each."""

from torch import Tensor, nn

from penstock.errors import ConfigError


class DropPath(nn.Module):
    """Replace some samples of a branch by zeros, and divide the others by the keep probability.

    In training each sample is dropped with the probability `rate * progress`, independently; in
    evaluation the input is unchanged.  (B, ...) -> (B, ...).

    The probability may rise during training, as in ScheduledDropPath (Zoph et al. 2018, section
    3): see `set_drop_path_progress`.  By default it is `rate` from the first step on.

    Raises:
        ConfigError: `rate` is not a number from 0 to below 1.
    """

    progress: float
    """The current factor of `rate`, from 0 to 1."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ConfigError(
                f"drop-path rate {rate}: it is the chance that a branch is dropped, from 0 to "
                "below 1 (papers that give the chance to keep it mean 1 minus that)"
            )
        self.rate, self.progress = rate, 1.0

    def forward(self, x: Tensor) -> Tensor:
        """Drop some samples in training.

        At progress 0 it drops none but still draws random numbers, so that a layer that draws
        does so from its first step on.
        """
        if not self.training or self.rate == 0:
            return x
        keep = 1 - self.rate * self.progress
        mask = x.new_empty(x.shape[0], *(1 for _ in x.shape[1:])).bernoulli_(keep)
        return x * mask.div_(keep)

    def extra_repr(self) -> str:
        """Show the final rate."""
        return f"rate={self.rate}"


def set_drop_path_progress(model: nn.Module, progress: float) -> None:
    """Set the progress of training, from 0 to 1; drop probabilities grow in proportion.

    It is the same for every `DropPath` of the model, as in the default ("v1") of AmoebaNet's
    public code; its variants "v2" and "v3" also scale by the depth of the cell.

    Call it before each step, also after a resume: checkpoints do not save it.

    Raises:
        ConfigError: `progress` is not a number from 0 to 1.
    """
    if not 0 <= progress <= 1:
        raise ConfigError(
            f"progress {progress}: give the share of all training steps that are done, from 0 to 1"
        )
    for module in model.modules():
        if isinstance(module, DropPath):
            module.progress = progress
