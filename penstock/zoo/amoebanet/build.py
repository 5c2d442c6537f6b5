"""AmoebaNets by their sizes."""

from typing import Any

from .design import Design
from .genotype import AMOEBANET_B, AMOEBANET_D
from .model import AmoebaNet


def amoebanet_d(num_layers: int = 18, num_filters: int = 208, **choices: Any) -> AmoebaNet:
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
        choices: the other fields of `Design`, such as num_classes=1000 and image_size=224.

    With images of 32 pixels the last stack has one pixel, and the auxiliary head always ends so:
    in training, a micro-batch then needs two samples for BatchNorm to have a variance.

    Linear layers start as torch's do: a variance by fan-out, which the TPU code has there too,
    gives large logits where classes are few.

    Raises:
        ConfigError: a size or a share cannot work.
    """
    return AmoebaNet(AMOEBANET_D, Design(num_layers, num_filters, **choices))


def amoebanet_b(num_layers: int = 18, num_filters: int = 512, **choices: Any) -> AmoebaNet:
    """Build AmoebaNet-B (L, D), the paper's model for accuracy: (18, 512) at 480 pixels.

    That one has 557 M parameters, and 84.4 % top-1 accuracy on ImageNet (section 4).  Its cells
    have separable convolutions in place of the bottlenecks of AmoebaNet-D, and the output of a
    reduction cell has 2 times its width.  All else is as in `amoebanet_d`, arguments too, but for
    image_size, which is 480 where it is not given.

    Raises:
        ConfigError: a size or a share cannot work.
    """
    choices = {"image_size": 480, **choices}
    return AmoebaNet(AMOEBANET_B, Design(num_layers, num_filters, **choices))
