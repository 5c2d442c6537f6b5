"""AmoebaNets by their sizes."""

from .design import Design
from .genotype import AMOEBANET_B, AMOEBANET_D
from .model import AmoebaNet


def amoebanet_d(  # noqa: PLR0913 - a builder: each a keyword with a default
    num_layers: int = 18,
    num_filters: int = 208,
    *,
    num_classes: int = 1000,
    in_channels: int = 3,
    image_size: int = 224,
    dropout: float = 0.5,
    drop_path: float = 0.0,
    auxiliary: bool = True,
    small: bool = False,
    norm_momentum: float = 0.1,
    norm_epsilon: float = 1e-5,
) -> AmoebaNet:
    """Build AmoebaNet-D (L, D), the paper's model for scaling and speed (tables 1 to 3).

    (B, in_channels, H, W) -> (B, num_classes); in training also the auxiliary head's (B,
    num_classes), whose loss Real et al. weigh by 0.4.

        stem: 3x3 convolution, stride 2     32 channels       111 x 111 for 224 x 224
        2 reduction cells                   width D/4, D/2     56, 28
        L/3 normal cells                    D                  28
        reduction cell, L/3 normal cells    2D                 14     auxiliary head
        reduction cell, L/3 normal cells    4D                 7
        ReLU, mean over pixels, dropout, linear layer

    The output of a normal cell has 4 times its width, that of a reduction cell 3 times.

    Args:
        num_layers: L, the normal cells; if no multiple of 3, the later stacks have more.
        num_filters: D, the width of the first stack: a multiple of 4, 16 or more.
        num_classes: the paper's counts fit 1000; the TPU code has 1001, one for "background".
        in_channels: 3 for colour images, 1 for grey ones.
        image_size: pixels a side, 32 or more; the auxiliary head is made for it.  Images of
            another size, or of unequal sides, are fine too, see `AuxiliaryHead`.
        dropout: chance to drop a feature before the last layer (Real et al.: 0.5).
        drop_path: chance to drop the output of an operation, at the end of training (Real et
            al.: 0.3, which is a chance of 0.7 to keep it); see `set_drop_path_progress`.
        auxiliary: whether there is an auxiliary head.
        small: leave out the stem's reductions, as for CIFAR in Real et al.: its convolution has
            stride 1 and D channels, and images have 4 pixels a side or more.
        norm_momentum: weight of the newest batch in the running statistics of BatchNorm.  The
            TPU library's default, a decay of 0.9997 (here 0.0003), remembers 3,000 steps, too
            many for short runs; this is its command line's decay of 0.9.
        norm_epsilon: what BatchNorm adds to the variance; the TPU library has 1e-3 by default,
            its command line this.

    With images of 32 pixels the last stack has one pixel, and the auxiliary head always ends so:
    in training, a micro-batch then needs two samples for BatchNorm to have a variance.

    Linear layers start as torch's do: a variance by fan-out, which the TPU code has there too,
    gives large logits where classes are few.

    Raises:
        ConfigError: a size or a share cannot work.
    """
    design = Design(
        num_layers=num_layers,
        num_filters=num_filters,
        num_classes=num_classes,
        in_channels=in_channels,
        image_size=image_size,
        dropout=dropout,
        drop_path=drop_path,
        auxiliary=auxiliary,
        small=small,
        norm_momentum=norm_momentum,
        norm_epsilon=norm_epsilon,
    )
    return AmoebaNet(AMOEBANET_D, design)


def amoebanet_b(  # noqa: PLR0913 - a builder: each a keyword with a default
    num_layers: int = 18,
    num_filters: int = 512,
    *,
    num_classes: int = 1000,
    in_channels: int = 3,
    image_size: int = 480,
    dropout: float = 0.5,
    drop_path: float = 0.0,
    auxiliary: bool = True,
    small: bool = False,
    norm_momentum: float = 0.1,
    norm_epsilon: float = 1e-5,
) -> AmoebaNet:
    """Build AmoebaNet-B (L, D), the paper's model for accuracy: (18, 512) at 480 pixels.

    That one has 557 M parameters, and 84.4 % top-1 accuracy on ImageNet (section 4).  Its cells
    have separable convolutions in place of the bottlenecks of AmoebaNet-D, and the output of a
    reduction cell has 2 times its width.  All else is as in `amoebanet_d`, arguments too.

    Raises:
        ConfigError: a size or a share cannot work.
    """
    design = Design(
        num_layers=num_layers,
        num_filters=num_filters,
        num_classes=num_classes,
        in_channels=in_channels,
        image_size=image_size,
        dropout=dropout,
        drop_path=drop_path,
        auxiliary=auxiliary,
        small=small,
        norm_momentum=norm_momentum,
        norm_epsilon=norm_epsilon,
    )
    return AmoebaNet(AMOEBANET_B, design)
