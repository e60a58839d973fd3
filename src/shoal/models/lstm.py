"""An LSTM text classifier, in one direction or both."""

import torch
from torch import nn

from shoal.core.spec import DataSpec
from shoal.models import section as sections
from shoal.models.needs import text_classes

PADDING = 0


def build_lstm(section: sections.Lstm, spec: DataSpec) -> "Lstm":
    """The classifier that `section` asks for, sized by the vocabulary and the classes of `spec`."""
    vocab_size, num_classes = text_classes(section.name, spec)
    return Lstm(
        vocab_size,
        num_classes,
        embed=section.embed,
        hidden=section.hidden,
        layers=section.layers,
        dropout=section.dropout,
        bidirectional=section.name == "bilstm",
    )


class Lstm(nn.Module):
    """Embedding, stacked LSTM layers, mean and max over the real tokens, a linear classifier.

    The logits do not depend on how much padding follows the text.
    """

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        *,
        embed: int,
        hidden: int,
        layers: int = 1,
        dropout: float = 0.0,
        bidirectional: bool = False,
    ) -> None:
        super().__init__()
        width = 2 * hidden if bidirectional else hidden
        self.embedding = nn.Embedding(vocab_size, embed, padding_idx=PADDING)
        self.layers = nn.ModuleList(
            LstmLayer(embed if index == 0 else width, hidden, bidirectional) for index in range(layers)
        )
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(2 * width, num_classes)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token ids `[batch, tokens]`, padded at the end with 0 -> logits `[batch, classes]`."""
        position = torch.arange(tokens.shape[1], device=tokens.device)
        # Up to the last real token; a text without any counts as one padding token, so that no mean divides by zero.
        length = ((tokens != PADDING) * (position + 1)).amax(dim=1, keepdim=True).clamp(min=1)
        real = position < length
        # Text backwards, padding where it was: looking this up twice gives the text forwards again.
        reversal = torch.where(real, length - 1 - position, position)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(self.dropout(x), reversal)
        outside = ~real.unsqueeze(-1)
        mean = x.masked_fill(outside, 0).sum(dim=1) / length
        largest = x.masked_fill(outside, torch.finfo(x.dtype).min).amax(dim=1)
        logits: torch.Tensor = self.classifier(self.dropout(torch.cat([mean, largest], dim=1)))
        return logits


class LstmLayer(nn.Module):
    """One recurrent layer; with `bidirectional`, a second one reads the reversed text.

    Reversing by index instead of packing: on the CPU, packed sequences took half as long again (64 texts of up to 64
    tokens), and they need the lengths on the host, which makes a GPU wait.
    """

    def __init__(self, inputs: int, hidden: int, bidirectional: bool) -> None:
        super().__init__()
        self.ahead = nn.LSTM(inputs, hidden, batch_first=True)
        self.back = nn.LSTM(inputs, hidden, batch_first=True) if bidirectional else None
        # oneDNN has no bfloat16 LSTM for processors without AVX-512, and torch then raises.
        has_onednn = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        self.needs_float = has_onednn and not torch.ops.mkldnn._is_mkldnn_bf16_supported()

    def forward(self, x: torch.Tensor, reversal: torch.Tensor) -> torch.Tensor:
        """`[batch, tokens, inputs]` -> `[batch, tokens, hidden]`, twice as wide with both directions."""
        if self.needs_float and x.device.type == "cpu" and torch.is_autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                # Without autocast torch has one of its own. The weights of a divided model may be bfloat16 themselves.
                return self._read(x.to(next(self.ahead.parameters()).dtype), reversal)
        return self._read(x, reversal)

    def _read(self, x: torch.Tensor, reversal: torch.Tensor) -> torch.Tensor:
        ahead: torch.Tensor = self.ahead(x)[0]
        if self.back is None:
            return ahead
        back = _reorder(self.back(_reorder(x, reversal))[0], reversal)
        return torch.cat([ahead, back], dim=-1)


def _reorder(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.gather(1, index.unsqueeze(-1).expand_as(x))
