"""The models that are measured: plain modules that know nothing of pipelines."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """A pre-norm transformer block: (B, T, dim) -> (B, T, dim)."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.widen, self.narrow = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Attend, then transform each token; both are added to what came in."""
        qkv = self.qkv(self.norm1(x_BTD)).unflatten(-1, (3, self.num_heads, -1))
        q_BHTd, k_BHTd, v_BHTd = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        heads = functional.scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd)
        x_BTD = x_BTD + self.out(heads.transpose(1, 2).flatten(2))
        wide = functional.gelu(self.widen(self.norm2(x_BTD)))
        return x_BTD + self.narrow(wide)


def transformer(num_blocks: int, dim: int, num_heads: int) -> nn.Sequential:
    """Build the same blocks with the same parameters at every call."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        return nn.Sequential(*[Block(dim, num_heads) for _ in range(num_blocks)])


class ConvBlock(nn.Module):
    """3x3 convolution, BatchNorm and ReLU, added to the input: (B, C, H, W) -> the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm, self.relu = nn.BatchNorm2d(width), nn.ReLU()

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Give x + relu(norm(conv(x)))."""
        y_BCHW: Tensor = self.relu(self.norm(self.conv(x_BCHW)))
        return x_BCHW + y_BCHW


def conv_net(num_blocks: int, width: int) -> nn.Sequential:
    """Build a stem and `num_blocks` - 1 blocks: (B, 3, H, W) -> (B, width, H, W)."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        stem = nn.Conv2d(3, width, 3, padding=1)
        return nn.Sequential(stem, *[ConvBlock(width) for _ in range(num_blocks - 1)])
