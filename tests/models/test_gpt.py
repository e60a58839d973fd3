import json
import math

import pytest
import torch
import torch.nn.functional as F

from shoal.core.errors import UserError
from shoal.core.spec import DataSpec
from shoal.models import section as sections
from shoal.models.gpt import Gpt, build_gpt

from .gradients import parameters_without_gradient
from .heads import by_head
from .plans import parameters_without_word

TEXT = DataSpec(vocab_size=31, context=16)


def small(**settings):
    settings = {"layers": 2, "heads": 2, "dim": 16, **settings}
    return build_gpt(sections.Gpt(name="gpt", **settings), TEXT)


def from_transformers(state):
    """Our weights out of a GPT2LMHeadModel's state dict, whose linear layers are stored transposed."""
    names = {
        "transformer.wte": "token_embedding",
        "transformer.wpe": "position_embedding",
        "transformer.ln_f": "norm",
        "lm_head": "head",
        "transformer.h": "blocks",
        "ln_1": "norm1",
        "ln_2": "norm2",
        "attn.c_attn": "attention.qkv_by_head",
        "attn.c_proj": "attention.project",
        "mlp.c_fc": "mlp.expand",
        "mlp.c_proj": "mlp.project",
    }
    ours = {}
    for name, tensor in state.items():
        transposed = ".c_" in name and name.endswith("weight")
        for theirs, our in names.items():
            name = name.replace(theirs, our)
        tensor = tensor.t() if transposed else tensor
        ours[name] = by_head(tensor, heads=2) if ".qkv_by_head." in name else tensor
    return ours


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tie_weights", [False, True])
def test_logits_for_every_token(bias, tie_weights):
    model = small(bias=bias, tie_weights=tie_weights)
    assert model(torch.randint(31, (3, 16))).shape == (3, 16, 31)
    assert model(torch.randint(31, (3, 5))).shape == (3, 5, 31)
    assert (model.head.weight is model.token_embedding.weight) == tie_weights
    assert any(name.endswith("bias") for name, _ in model.named_parameters()) == bias


@pytest.mark.parametrize(("tie_weights", "expected"), [(True, 124_439_808), (False, 124_439_808 + 50_257 * 768)])
def test_gpt2_has_the_published_number_of_parameters(tie_weights, expected):
    section = sections.Gpt(name="gpt", layers=12, heads=12, dim=768, tie_weights=tie_weights)
    with torch.device("meta"):
        model = build_gpt(section, DataSpec(vocab_size=50_257, context=1024))
    assert sum(p.numel() for p in model.parameters()) == expected


def test_same_logits_and_gradients_as_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    ours = small().eval()
    ours.load_state_dict(from_transformers(theirs.state_dict()))
    tokens = torch.randint(31, (3, 16))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)

    F.cross_entropy(ours(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    F.cross_entropy(theirs(tokens).logits.flatten(0, 1), tokens.roll(-1, 1).flatten()).backward()
    expected = from_transformers({name: p.grad for name, p in theirs.named_parameters()})
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-4, rtol=1e-4, msg=lambda m, n=name: n + m)


def test_a_later_token_does_not_alter_earlier_logits():
    model = small().eval()
    tokens = torch.randint(31, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 31
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    for position in range(9, 16):
        assert not torch.allclose(before[:, position], after[:, position], atol=1e-6, rtol=0)


def test_gradients_reach_every_parameter():
    model = small()
    assert parameters_without_gradient(model, torch.arange(16).repeat(4, 1)) == []


def test_starts_at_the_loss_of_a_uniform_guess():
    torch.manual_seed(0)
    model = Gpt(1000, 32, layers=4, heads=4, dim=64)
    tokens = torch.randint(1000, (4, 32))
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
    assert loss.item() == pytest.approx(math.log(1000), abs=0.1)


def test_more_tokens_than_the_context():
    with pytest.raises(ValueError, match=r"17 tokens do not fit into the model's context of 16"):
        small()(torch.zeros(1, 17, dtype=torch.long))


def test_heads_that_do_not_divide_the_width():
    with pytest.raises(UserError, match=r"^model\.heads: 3 does not divide model\.dim 16; allowed: 1, 2, 4, 8, 16$"):
        small(heads=3)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (DataSpec(image_shape=(1, 8, 8), num_classes=10), "needs text, but the data gives images of 1x8x8"),
        (DataSpec(vocab_size=100, num_classes=4), "needs running text, but the data gives text in 4 classes"),
    ],
)
def test_other_data_is_refused(spec, message):
    with pytest.raises(UserError, match=rf"^model\.name: gpt {message}"):
        build_gpt(sections.Gpt(name="gpt"), spec)


def test_the_plan_for_sharing_layers_names_all_of_them():
    """Tokens are divided from the dropout on: what computes with them must be named."""
    assert parameters_without_word(small()) == ["position_embedding.weight"]
    assert json.loads(json.dumps(Gpt.shoal_tensor)) == Gpt.shoal_tensor, "plain data"
    model = small(heads=4)
    assert (model.heads, model.num_tokens) == (4, 16)
