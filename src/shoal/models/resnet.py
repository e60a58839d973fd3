"""Residual networks (v1.5: the stride is in the 3x3 convolution), with torchvision's names for the weights."""

import torch
from torch import nn

from shoal.core.spec import DataSpec
from shoal.models import section as sections
from shoal.models.needs import image_classes

SMALL_IMAGE = 64
"""Up to this many pixels a side, `stem: auto` keeps the resolution instead of quartering it at once."""

DEPTHS: dict[str, list[int]] = {
    "resnet18": [2, 2, 2, 2],
    "resnet34": [3, 4, 6, 3],
    "resnet50": [3, 4, 6, 3],
    "resnet101": [3, 4, 23, 3],
}
"""Blocks in each of the four stages."""


def build_resnet(section: sections.ResNet, spec: DataSpec) -> "ResNet":
    """The network that `section` asks for, sized by the images of `spec`."""
    (channels, height, width), num_classes = image_classes(section.name, spec)
    small = section.stem == "small" or (section.stem == "auto" and max(height, width) <= SMALL_IMAGE)
    block = BasicBlock if section.name in ("resnet18", "resnet34") else Bottleneck
    return ResNet(block, DEPTHS[section.name], channels, num_classes, width=section.width, small_stem=small)


class ResNet(nn.Module):
    """Stem, four stages of residual blocks, global average and a linear classifier."""

    def __init__(
        self,
        block: type["BasicBlock"] | type["Bottleneck"],
        depths: list[int],
        in_channels: int,
        num_classes: int,
        *,
        width: int = 64,
        small_stem: bool = False,
    ) -> None:
        super().__init__()
        kernel, stride = (3, 1) if small_stem else (7, 2)
        self.conv1 = nn.Conv2d(in_channels, width, kernel, stride, padding=kernel // 2, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if small_stem else nn.MaxPool2d(3, 2, padding=1)
        inputs, stages = width, []
        for index, depth in enumerate(depths):
            stage_width, stage_stride = width * 2**index, 1 if index == 0 else 2
            stages.append(_stage(block, inputs, stage_width, depth, stage_stride))
            inputs = stage_width * block.expansion
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.fc = nn.Linear(inputs, num_classes)
        # The blocks lie in four lists, of which the default search would see only the largest.
        self.shoal_blocks = [
            f"layer{stage}.{index}" for stage, depth in enumerate(depths, start=1) for index in range(depth)
        ]
        _init_weights(self)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """`[batch, channels, height, width]` -> logits `[batch, classes]`."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: torch.Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    expansion = 1

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _shortcut(inputs, width, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output; height and width divided by the stride."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        result: torch.Tensor = self.relu(out + self.downsample(x))
        return result


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut; the output is four times as wide as the middle."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(inputs, outputs, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The block's output; height and width divided by the stride."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        result: torch.Tensor = self.relu(out + self.downsample(x))
        return result


def _stage(
    block: type[BasicBlock] | type[Bottleneck], inputs: int, width: int, depth: int, stride: int
) -> nn.Sequential:
    outputs = width * block.expansion
    rest = [block(outputs, width, stride=1) for _ in range(depth - 1)]
    return nn.Sequential(block(inputs, width, stride), *rest)


def _shortcut(inputs: int, outputs: int, stride: int) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def _init_weights(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    for module in model.modules():
        # Every block starts as its shortcut, which trains better at large batches (Goyal et al. 2017).
        if isinstance(module, BasicBlock):
            nn.init.zeros_(module.bn2.weight)
        elif isinstance(module, Bottleneck):
            nn.init.zeros_(module.bn3.weight)
