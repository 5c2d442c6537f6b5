"""AmoebaNet-B and AmoebaNet-D, the image classifiers of the GPipe paper.

Huang et al. 2019 (GPipe, arXiv 1811.06965), table 1 and section 4; Real et al. 2019 (arXiv
1802.01548) for the architectures.  Neither published code; details follow the public TPU code
(tensorflow/tpu, models/official/amoeba_net), whose rules give the paper's 557 M parameters of
AmoebaNet-B (18, 512) exactly, and its five AmoebaNet-D to within 0.4 %.
"""

from .model import AmoebaNet, amoebanet_b, amoebanet_d

__all__ = ["AmoebaNet", "amoebanet_b", "amoebanet_d"]
