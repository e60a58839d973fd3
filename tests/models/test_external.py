import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from shoal.core.errors import UserError
from shoal.core.spec import DataSpec
from shoal.models import section as sections
from shoal.models.build import build_model

IMAGES = DataSpec(image_shape=(1, 8, 8), num_classes=10)
NEWS = DataSpec(vocab_size=50, num_classes=4)
BOOK = DataSpec(vocab_size=31, context=16)


def build(name, args=None, spec=IMAGES):
    return build_model(sections.CustomModel(name=name, args=args or {}), spec)


def parameters_of(model):
    return sum(p.numel() for p in model.parameters())


class TestOwnFunction:
    """What a user writes beside the recipe."""

    @pytest.fixture(autouse=True)
    def user_module(self, tmp_path, monkeypatch):
        (tmp_path / "my_models.py").write_text(
            textwrap.dedent(
                """
                from torch import nn

                def sized(spec, width=8):
                    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, spec.num_classes))

                def plain(width, depth=1):
                    return nn.Sequential(*[nn.Linear(width, width) for _ in range(depth)])

                def anything(**settings):
                    return nn.Linear(settings["inputs"], settings.get("outputs", 1), bias="spec" in settings)

                def nothing():
                    return None

                class Model(nn.Linear):
                    def __init__(self, spec, inputs):
                        super().__init__(inputs, spec.num_classes)

                ready = nn.Linear(2, 2)
                number = 3
                """
            )
        )
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        yield
        sys.modules.pop("my_models", None)

    def test_gets_its_arguments_and_the_spec(self):
        model = build("my_models:sized", {"width": 5})
        assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)
        assert model[1].out_features == 5

    def test_without_a_spec_parameter_gets_none(self):
        assert len(build("my_models:plain", {"width": 3, "depth": 2})) == 2
        assert build("my_models:anything", {"inputs": 4}).bias is None

    def test_may_be_a_class(self):
        assert build("my_models:Model", {"inputs": 4}).out_features == 10

    def test_the_user_may_give_the_spec(self):
        model = build("my_models:Model", {"inputs": 4, "spec": DataSpec(num_classes=3)})
        assert model.out_features == 3

    @pytest.mark.parametrize(
        ("name", "args", "message"),
        [
            (
                "sized",
                {"widht": 5},
                "model.args: 'widht' is not an argument of my_models:sized; allowed: spec, width; did you mean width?",
            ),
            ("plain", {}, "model.args: my_models:plain: missing a required argument: 'width'; allowed: depth, width"),
            (
                "nothing",
                {"width": 5},
                "model.args: 'width' is not an argument of my_models:nothing; allowed: none, it takes no arguments",
            ),
            ("nothing", {}, "model.name: my_models:nothing returned a NoneType; allowed: a torch.nn.Module"),
            (
                "ready",
                {},
                "model.name: my_models:ready is a Linear; allowed: a function or class that makes the model",
            ),
            (
                "number",
                {},
                "model.name: my_models:number is a int; allowed: a function or class that makes the model",
            ),
            ("sizd", {}, "model.name: module 'my_models' has no 'sizd'; did you mean sized?"),
        ],
    )
    def test_mistakes_are_named(self, name, args, message):
        with pytest.raises(UserError) as caught:
            build(f"my_models:{name}", args)
        assert str(caught.value) == message

    def test_a_module_that_is_not_there(self):
        with pytest.raises(UserError, match=r"^model\.name: no module named 'my_modles'"):
            build("my_modles:sized")

    def test_what_fails_inside_keeps_its_traceback(self):
        with pytest.raises(KeyError, match="inputs"):
            build("my_models:anything")


class TestTransformers:
    """Untrained transformers models, sized by the data."""

    @pytest.fixture(autouse=True)
    def library(self):
        return pytest.importorskip("transformers")

    def test_resnet(self):
        args = {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1], "layer_type": "basic"}
        model = build("transformers:ResNetForImageClassification", args)
        assert model(torch.randn(2, 1, 8, 8)).shape == (2, 10)

    @pytest.mark.parametrize("shape", [(1, 8, 8), (3, 8, 12)])
    def test_vit(self, shape):
        args = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 4}
        model = build("transformers:ViTForImageClassification", args, DataSpec(image_shape=shape, num_classes=7))
        assert model(torch.randn(2, *shape)).shape == (2, 7)

    def test_gpt2(self):
        args = {"n_layer": 1, "n_embd": 16, "n_head": 2}
        model = build("transformers:GPT2LMHeadModel", args, BOOK)
        assert model(torch.randint(31, (2, 16))).shape == (2, 16, 31)
        assert model.model.config.n_positions == 16
        assert model.model.config.use_cache is False

    @pytest.mark.parametrize("name", ["n_positions", "max_position_embeddings"])
    def test_what_the_user_sets_stays(self, name):
        args = {"n_layer": 1, "n_embd": 16, "n_head": 2, "vocab_size": 64, name: 99}
        config = build("transformers:GPT2LMHeadModel", args, BOOK).model.config
        assert (config.n_positions, config.vocab_size) == (99, 64)

    @pytest.mark.parametrize(
        ("name", "args"),
        [
            (
                "BertForSequenceClassification",
                {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32},
            ),
            ("GPT2ForSequenceClassification", {"n_layer": 2, "n_embd": 16, "n_head": 2}),
        ],
    )
    def test_text_classifiers_do_not_see_the_padding(self, name, args):
        model = build(f"transformers:{name}", args, NEWS).eval()
        tokens = torch.tensor([[7, 3, 9, 4], [5, 8, 0, 0]])
        with torch.no_grad():
            logits = model(tokens)
            longer = model(torch.cat([tokens, torch.zeros(2, 5, dtype=torch.long)], dim=1))
        assert logits.shape == (2, 4)
        torch.testing.assert_close(logits, longer, atol=1e-5, rtol=1e-4)

    def test_trains(self):
        torch.manual_seed(0)
        model = build("transformers:GPT2LMHeadModel", {"n_layer": 1, "n_embd": 16, "n_head": 2}, BOOK)
        assert model.training
        tokens = torch.arange(16).repeat(2, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        losses = []
        for _ in range(15):
            loss = nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.7 * losses[0]

    @pytest.mark.parametrize(
        ("name", "args", "spec", "message"),
        [
            (
                "GPT3LMHeadModel",
                {},
                BOOK,
                r"model\.name: transformers has no class 'GPT3LMHeadModel'; did you mean GPT",
            ),
            ("AutoModelForCausalLM", {}, BOOK, r"model\.name: transformers:AutoModelForCausalLM is not a model class"),
            ("pipeline", {}, BOOK, r"model\.name: transformers:pipeline is not a model class"),
            (
                "GPT2LMHeadModel",
                {"n_layers": 2},
                BOOK,
                r"model\.args: 'n_layers' is not a setting of GPT2Config .* allowed: .*did you mean n_layer\?",
            ),
            (
                "GPT2LMHeadModel",
                {"n_embd": 16, "n_head": 3},
                BOOK,
                r"model\.args: transformers:GPT2LMHeadModel does not",
            ),
            ("GPT2LMHeadModel", {"n_layer": "two"}, BOOK, r"model\.args: transformers:GPT2LMHeadModel does not accept"),
            (
                "ViTForImageClassification",
                {},
                IMAGES,
                r"model\.args: patch_size 16 does not divide the image's 8x8 pixels; allowed: 1, 2, 4, 8$",
            ),
            (
                "ViTForImageClassification",
                {},
                NEWS,
                r"model\.name: transformers:ViTForImageClassification needs images, but the data gives text in 4",
            ),
            (
                "GPT2LMHeadModel",
                {},
                IMAGES,
                r"model\.name: transformers:GPT2LMHeadModel needs text, but the data gives images of 1x8x8",
            ),
        ],
    )
    def test_mistakes_are_named(self, name, args, spec, message):
        with pytest.raises(UserError, match=f"^{message}"):
            build(f"transformers:{name}", args, spec)

    def test_a_class_without_a_head(self):
        model = build("transformers:GPT2Model", {"n_layer": 1, "n_embd": 16, "n_head": 2}, BOOK)
        with pytest.raises(UserError, match=r"^model\.name: transformers:GPT2Model gives no logits"):
            model(torch.randint(31, (2, 16)))


class TestTorchvision:
    """torchvision's models, where it works."""

    @pytest.fixture(autouse=True)
    def library(self):
        return pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))

    def test_gets_the_number_of_classes(self):
        model = build("torchvision:squeezenet1_1", {"dropout": 0.0}, DataSpec(image_shape=(3, 64, 64), num_classes=7))
        assert model(torch.randn(2, 3, 64, 64)).shape == (2, 7)

    def test_what_the_user_sets_stays(self):
        assert build("torchvision:resnet18", {"num_classes": 3}).fc.out_features == 3

    @pytest.mark.parametrize(
        ("name", "args", "message"),
        [
            ("resnet19", {}, r"model\.name: torchvision has no model 'resnet19'; allowed: .*; did you mean resnet1"),
            ("resnet18", {"widht": 3}, r"model\.args: torchvision:resnet18 does not take widht=3: .*widht"),
        ],
    )
    def test_mistakes_are_named(self, name, args, message):
        with pytest.raises(UserError, match=f"^{message}"):
            build(f"torchvision:{name}", args)


BUILD = """
import sys
from shoal.core.errors import UserError
from shoal.core.spec import DataSpec
from shoal.models import section
from shoal.models.build import build_model
try:
    build_model(section.CustomModel(name=sys.argv[1]), DataSpec(image_shape=(3, 8, 8), num_classes=10))
except UserError as error:
    print(error)
"""


def build_with_package(folder, package, content, name):
    """The user error of building `name` in a process that finds this `package` first."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(content)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{BUILD}", name]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_torchvision_that_does_not_fit_torch(tmp_path):
    content = "raise RuntimeError('operator torchvision::nms does not exist')"
    message = build_with_package(tmp_path, "torchvision", content, "torchvision:resnet18")
    assert message.startswith(f"model.name: the installed torchvision does not work with torch {torch.__version__}")
    assert "operator torchvision::nms does not exist" in message
    assert "install both from one index" in message


@pytest.mark.parametrize(("package", "model"), [("torchvision", "resnet18"), ("transformers", "GPT2LMHeadModel")])
def test_a_package_that_is_not_installed(tmp_path, package, model):
    content = f"raise ModuleNotFoundError(\"No module named '{package}'\")"
    message = build_with_package(tmp_path, package, content, f"{package}:{model}")
    assert message.startswith(f"model.name: needs {package}")
    assert f"pip install 'shoal[{package}]'" in message


def test_a_transformers_class_that_cannot_be_imported(tmp_path):
    """As beside a torchvision that does not fit torch: the class fails on first use, not the package."""
    content = """
def __getattr__(name):
    try:
        raise RuntimeError("operator torchvision::nms does not exist")
    except RuntimeError as error:
        raise ModuleNotFoundError(f"Could not import module {name!r}") from error
"""
    message = build_with_package(tmp_path, "transformers", content, "transformers:GPT2LMHeadModel")
    assert message.startswith("model.name: transformers:GPT2LMHeadModel cannot be imported here: ")
    assert message.endswith("operator torchvision::nms does not exist")
