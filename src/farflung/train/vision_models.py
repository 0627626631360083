"""Two small classifiers of grey images, sized by one dial: a plain CNN, and a ResNet with BatchNorm.

Shape letters: B batch, C channels, H rows, W columns, K classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farflung.errors import UserError, did_you_mean
from farflung.train.images import NUM_CLASSES

MEAN, STD = 72.94, 90.02  # of Fashion-MNIST's pixels, 0 to 255
HEAD_STD = 0.01  # so small that a new model's loss is ln K
IMAGE_SIZE = (28, 28)


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Sizes of a classifier.

    Args:
        widths: channels of its three stages.
        residual_blocks: of a ResNet's stage; 0 is the plain CNN.
    """

    widths: tuple[int, int, int]
    residual_blocks: int = 0


VISION_SCALES: Mapping[str, VisionConfig] = MappingProxyType(
    {
        "micro": VisionConfig(widths=(16, 32, 64)),  # 0.034 M parameters
        "tiny": VisionConfig(widths=(32, 64, 128)),  # 0.11 M
        "resnet": VisionConfig(widths=(16, 32, 64), residual_blocks=1),  # 0.078 M, ResNet-8
    }
)


def vision_config(scale: str) -> VisionConfig:
    """Return the sizes behind a scale name, or raise UserError with the closest known name."""
    if scale not in VISION_SCALES:
        raise UserError(f"unknown scale {scale!r} of task 'vision'{did_you_mean(scale, VISION_SCALES)}")
    return VISION_SCALES[scale]


def build_classifier(
    config: VisionConfig, image_size: tuple[int, int] = IMAGE_SIZE, *, seed: int = 0
) -> nn.Module:
    """Return a new classifier, uint8 [B, H, W] -> logits [B, K]; the same seed gives the same bits.

    Convolutions and the head have He's initial weights and a small normal; the global random state is neither
    read nor changed.

    >>> sum(p.numel() for p in build_classifier(VISION_SCALES["micro"]).parameters())
    33802
    """
    with torch.random.fork_rng(devices=[]):  # the constructors draw values that are replaced below
        model = ResNet(config) if config.residual_blocks else CNN(config, image_size)
    _init_weights(model, seed)
    return model


class CNN(nn.Module):
    """Three convolutions of stride 2 and a linear head, without normalisation.

    Args:
        config: its widths.
        image_size: rows and columns of an image, of which the head's size follows.
    """

    def __init__(self, config: VisionConfig, image_size: tuple[int, int] = IMAGE_SIZE) -> None:
        super().__init__()
        a, b, c = config.widths
        self.convs = nn.ModuleList([
            nn.Conv2d(1, a, 5, stride=2, padding=2),
            nn.Conv2d(a, b, 3, stride=2, padding=1),
            nn.Conv2d(b, c, 3, stride=2, padding=1),
        ])  # fmt: skip
        rows, columns = (-(-side // 8) for side in image_size)
        self.head = nn.Linear(c * rows * columns, NUM_CLASSES)

    def forward(self, pixels_BHW: Tensor) -> Tensor:
        x_BCHW = normalised(pixels_BHW, self.head.weight.dtype)
        for conv in self.convs:
            x_BCHW = F.relu(conv(x_BCHW))
        logits_BK: Tensor = self.head(x_BCHW.flatten(1))
        return logits_BK


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions around a shortcut, [B, C, H, W] -> [B, C', H / stride, W / stride]."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            conv = nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(channels))

    def forward(self, x_BCHW: Tensor) -> Tensor:
        y_BCHW = F.relu(self.norm1(self.conv1(x_BCHW)))
        return F.relu(self.norm2(self.conv2(y_BCHW)) + self.shortcut(x_BCHW))


class ResNet(nn.Module):
    """ResNet-8 and its like, with BatchNorm (arXiv 1512.03385, section 4.2), for images of any size.

    Three stages of `residual_blocks` blocks, the first at half the image's side: on one CPU core a quarter of
    the work of the paper's, which keeps the side.
    """

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width = config.widths[0]
        self.stem = nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList()
        for stage, channels in enumerate(config.widths):
            for number in range(config.residual_blocks):
                self.blocks.append(ResidualBlock(width, channels, 2 if stage and not number else 1))
                width = channels
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, pixels_BHW: Tensor) -> Tensor:
        x_BCHW = F.relu(self.norm(self.stem(normalised(pixels_BHW, self.head.weight.dtype))))
        for block in self.blocks:
            x_BCHW = block(x_BCHW)
        logits_BK: Tensor = self.head(x_BCHW.mean((2, 3)))
        return logits_BK


def normalised(pixels_BHW: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Map pixels, 0 to 255, to values [B, 1, H, W] of about mean 0 and deviation 1."""
    return pixels_BHW[:, None].to(dtype).sub(MEAN).div(STD)


@torch.no_grad()
def _init_weights(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu", generator=generator)
        elif isinstance(module, nn.Linear):
            module.weight.normal_(0.0, HEAD_STD, generator=generator)
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            module.bias.zero_()
