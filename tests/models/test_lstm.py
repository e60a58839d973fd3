import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from shoal.core.errors import UserError
from shoal.core.spec import DataSpec
from shoal.models import section as sections
from shoal.models.lstm import build_lstm

from .gradients import parameters_without_gradient

NEWS = DataSpec(vocab_size=50, num_classes=4)
TEXTS = [[7, 3, 9, 4, 1, 22], [5], [8, 8, 2]]


def build(name, layers=1, dropout=0.0):
    torch.manual_seed(0)
    section = sections.Lstm(name=name, embed=6, hidden=5, layers=layers, dropout=dropout)
    return build_lstm(section, NEWS).eval()


def padded(texts, length):
    return torch.tensor([text + [0] * (length - len(text)) for text in texts])


def packed_reference(model, tokens, lengths, layers):
    """The same weights in torch's own bidirectional LSTM over packed sequences."""
    reference = nn.LSTM(6, 5, num_layers=layers, bidirectional=True, batch_first=True)
    for index, layer in enumerate(model.layers):
        for direction, suffix in ((layer.ahead, ""), (layer.back, "_reverse")):
            for name, parameter in direction.named_parameters():
                getattr(reference, name.replace("l0", f"l{index}") + suffix).data.copy_(parameter.data)
    packed = pack_padded_sequence(model.embedding(tokens), lengths, batch_first=True, enforce_sorted=False)
    states, _ = pad_packed_sequence(reference(packed)[0], batch_first=True)
    pooled = [
        torch.cat([row[:length].mean(0), row[:length].amax(0)]) for row, length in zip(states, lengths, strict=True)
    ]
    return model.classifier(torch.stack(pooled))


@pytest.mark.parametrize("name", ["lstm", "bilstm"])
@pytest.mark.parametrize("layers", [1, 2])
class TestBothDirections:
    def test_logits_per_class(self, name, layers):
        assert build(name, layers)(padded(TEXTS, 8)).shape == (3, 4)

    def test_padding_does_not_matter(self, name, layers):
        model = build(name, layers)
        with torch.no_grad():
            alone = torch.cat([model(torch.tensor([text])) for text in TEXTS])
            for length in (6, 7, 40):
                torch.testing.assert_close(model(padded(TEXTS, length)), alone, atol=1e-6, rtol=1e-5)

    def test_gradients_do_not_depend_on_padding(self, name, layers):
        gradients = []
        for length in (6, 20):
            model = build(name, layers)
            F.cross_entropy(model(padded(TEXTS, length)), torch.tensor([0, 1, 2])).backward()
            gradients.append([p.grad for p in model.parameters()])
        for short, long in zip(*gradients, strict=True):
            torch.testing.assert_close(short, long, atol=1e-6, rtol=1e-4)

    def test_every_real_token_matters(self, name, layers):
        model = build(name, layers)
        with torch.no_grad():
            before = model(padded(TEXTS[:1], 8))
            for position in range(6):
                tokens = padded(TEXTS[:1], 8)
                tokens[0, position] = 33
                assert not torch.allclose(model(tokens), before, atol=1e-5, rtol=0)

    def test_a_text_of_padding_alone_is_finite(self, name, layers):
        model = build(name, layers).train()
        tokens = padded([[], *TEXTS], 8)
        logits = model(tokens)
        assert logits.isfinite().all()
        F.cross_entropy(logits, torch.tensor([0, 1, 2, 3])).backward()
        assert all(p.grad.isfinite().all() for p in model.parameters())
        torch.testing.assert_close(model(padded([[]], 1)), model(padded([[]], 12)))

    def test_gradients_reach_every_parameter(self, name, layers):
        assert parameters_without_gradient(build(name, layers), padded(TEXTS, 8)) == []


@pytest.mark.parametrize("layers", [1, 2])
def test_reversing_by_index_is_what_packing_does(layers):
    model = build("bilstm", layers)
    tokens = padded(TEXTS, 6)
    with torch.no_grad():
        expected = packed_reference(model, tokens, [6, 1, 3], layers)
        torch.testing.assert_close(model(tokens), expected, atol=1e-6, rtol=1e-5)


def test_one_direction_reads_forwards():
    """What the first state knows depends on nothing behind it, unlike with both directions."""
    tokens = padded(TEXTS[:1], 6)
    changed = tokens.clone()
    changed[0, 5] = 33
    reversal = torch.arange(5, -1, -1).unsqueeze(0)
    for name, same in (("lstm", True), ("bilstm", False)):
        model = build(name)
        first, second = (model.layers[0](model.embedding(t), reversal)[:, 0] for t in (tokens, changed))
        assert torch.equal(first, second) == same


def test_dropout_only_in_training():
    model = build("bilstm", layers=2, dropout=0.5)
    tokens = padded(TEXTS, 8)
    assert torch.equal(model(tokens), model(tokens))
    model.train()
    assert not torch.equal(model(tokens), model(tokens))


def test_number_of_parameters():
    model = build_lstm(sections.Lstm(name="bilstm", embed=16, hidden=8, layers=2), NEWS)
    first, second = 2 * 4 * 8 * (16 + 8 + 2), 2 * 4 * 8 * (16 + 8 + 2)
    assert sum(p.numel() for p in model.parameters()) == 50 * 16 + first + second + 32 * 4 + 4


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (DataSpec(image_shape=(1, 8, 8), num_classes=10), "needs text, but the data gives images of 1x8x8"),
        (DataSpec(vocab_size=65, context=256), "needs text with classes, but the data gives running text"),
    ],
)
def test_other_data_is_refused(spec, message):
    with pytest.raises(UserError, match=rf"^model\.name: bilstm {message}"):
        build_lstm(sections.Lstm(name="bilstm"), spec)
