import re

import pytest
import torch

from shoal.core.errors import UserError
from shoal.core.spec import DataSpec
from shoal.models import section as sections
from shoal.models.vit import build_vit

from .gradients import parameters_without_gradient
from .heads import by_head
from .plans import parameters_without_word


def build(image_shape=(3, 16, 16), num_classes=10, **settings):
    settings = {"layers": 2, "heads": 2, "dim": 16, **settings}
    return build_vit(sections.Vit(name="vit", **settings), DataSpec(image_shape=image_shape, num_classes=num_classes))


def from_transformers(state):
    """Our weights out of a ViTForImageClassification's state dict, where query, key and value lie apart."""
    names = {
        "vit.embeddings.cls_token": "class_token",
        "vit.embeddings.position_embeddings": "positions",
        "vit.embeddings.patch_embeddings.projection": "patches",
        "vit.layernorm": "norm",
        "classifier": "head",
    }
    ours, apart = {}, {}
    for name, tensor in state.items():
        for theirs, our in names.items():
            name = name.replace(theirs, our)
        if match := re.match(r"vit\.(?:encoder\.layer|layers)\.(\d+)\.(.*)\.(weight|bias)", name):
            block, layer, kind = match.groups()
            if part := re.search(r"(query|key|value|q_proj|k_proj|v_proj)$", layer):
                apart.setdefault(f"blocks.{block}.attention.qkv_by_head.{kind}", {})[part[0][0]] = tensor
                continue
            name = f"blocks.{block}.{LAYERS[layer]}.{kind}"
        ours[name] = tensor
    together = {name: torch.cat([parts["q"], parts["k"], parts["v"]]) for name, parts in apart.items()}
    return ours | {name: by_head(tensor, heads=2) for name, tensor in together.items()}


LAYERS = {
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "attention.output.dense": "attention.project",
    "attention.o_proj": "attention.project",
    "intermediate.dense": "mlp.expand",
    "output.dense": "mlp.project",
    "mlp.fc1": "mlp.expand",
    "mlp.fc2": "mlp.project",
}
"""The parts of a block in older and newer transformers."""


@pytest.mark.parametrize(("image_shape", "patch"), [((1, 8, 8), 4), ((3, 32, 32), 8), ((3, 12, 20), 4)])
def test_logits_per_class_for_any_image(image_shape, patch):
    model = build(image_shape, patch=patch)
    assert model(torch.randn(3, *image_shape)).shape == (3, 10)


def test_vit_tiny_has_the_published_number_of_parameters():
    with torch.device("meta"):
        model = build((3, 224, 224), 1000, patch=16, dim=192, layers=12, heads=3)
    assert sum(p.numel() for p in model.parameters()) == 5_717_416


def test_same_logits_as_transformers():
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=40,
        layer_norm_eps=1e-5,
        image_size=16,
        patch_size=4,
        num_labels=10,
    )
    theirs = transformers.ViTForImageClassification(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    ours = build(patch=4, mlp_ratio=2.5).eval()
    ours.load_state_dict(from_transformers(theirs.state_dict()))
    images = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images).logits, atol=1e-4, rtol=1e-4)


def test_gradients_reach_every_parameter():
    assert parameters_without_gradient(build(patch=4), torch.randn(4, 3, 16, 16)) == []


def test_patches_that_do_not_cover_the_image():
    message = r"^model\.patch: 5 does not divide the image's 32x32 pixels; allowed: 1, 2, 4, 8, 16, 32$"
    with pytest.raises(UserError, match=message):
        build((3, 32, 32), patch=5)
    with pytest.raises(UserError, match=r"^model\.patch: 8 does not divide the image's 12x24 pixels"):
        build((3, 12, 24), patch=8)


def test_heads_that_do_not_divide_the_width():
    with pytest.raises(UserError, match=r"^model\.heads: 5 does not divide model\.dim 192; allowed: 1, 2, 3, 4, 6"):
        build(heads=5, dim=192)


def test_an_mlp_of_no_width():
    with pytest.raises(UserError, match=r"^model\.mlp_ratio: 0\.01 times model\.dim 16 .*; allowed: 0\.0625 and more"):
        build(mlp_ratio=0.01)


def test_text_is_refused():
    with pytest.raises(UserError, match=r"^model\.name: vit needs images, but the data gives text"):
        build_vit(sections.Vit(name="vit"), DataSpec(vocab_size=100, num_classes=4))


def test_the_plan_for_sharing_layers_names_all_of_them():
    """Tokens are divided from the dropout on to the norm: what computes with them must be named."""
    outside = ["class_token", "positions", "patches.weight", "patches.bias", "head.weight", "head.bias"]
    model = build((3, 16, 24), patch=8)
    assert parameters_without_word(model) == outside
    assert (model.heads, model.num_tokens) == (2, 7)
