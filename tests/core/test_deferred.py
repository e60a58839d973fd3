"""A deferred model has, to the last bit, the weights of one built in memory; what cannot be deferred is refused."""

import copy
import logging
import os
import random
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

from shoal.core.deferred import CannotDeferError, Deferred, check_others
from shoal.core.errors import UserError
from shoal.core.spec import DataSpec
from shoal.models import section as sections
from shoal.models.build import build_model

IMAGES = DataSpec(image_shape=(3, 32, 32), num_classes=10)
Build = Callable[[], nn.Module]


def all_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(), *model.named_buffers()])


def seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number)
    torch.manual_seed(number)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape, found[name].stride()) == (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
        ), name
        assert torch.equal(found[name], tensor), name


def check(build: Build) -> tuple[Deferred, nn.Module]:
    """The same weights as in memory, twice; all generators where they would be; nothing fake left."""
    seed(3)
    eager = build()
    after = torch.get_rng_state(), np.random.random(), random.random()
    seed(3)
    deferred = Deferred(build)
    expected = {name: tensor.detach() for name, tensor in all_tensors(eager).items()}
    for _ in range(2):
        found = {}
        for name, whole in deferred.weights():
            found[name] = whole.clone(memory_format=torch.preserve_format)
            if 0 in whole.stride():  # a clone would be laid out in full
                found[name] = whole
            torch.rand(3)  # whoever takes them may draw
        assert_same(found, expected)
        assert torch.equal(torch.get_rng_state(), after[0])
    assert (np.random.random(), random.random()) == after[1:]
    check_model(deferred.model, eager)
    return deferred, eager


def check_model(model: nn.Module, eager: nn.Module) -> None:
    """The same but for the memory: names, what is shared, what trains."""
    assert [name for name, _ in model.named_modules()] == [name for name, _ in eager.named_modules()]
    own, other = all_tensors(model), all_tensors(eager)
    assert own.keys() == other.keys()
    for name, tensor in own.items():
        assert tensor.is_meta and not isinstance(tensor, FakeTensor)
        assert (tensor.shape, tensor.dtype, tensor.requires_grad) == (
            other[name].shape,
            other[name].dtype,
            other[name].requires_grad,
        )
        assert isinstance(tensor, nn.Parameter) == isinstance(other[name], nn.Parameter)
    assert list(model.state_dict()) == list(eager.state_dict()), "tied weights by both names, and no others"
    for module in model.modules():
        assert not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(list(vars(module).values())))


@pytest.mark.parametrize(
    ("section", "spec"),
    [
        (sections.Gpt(name="gpt", layers=2, heads=2, dim=32), DataSpec(vocab_size=50, context=16)),
        (
            sections.Gpt(name="gpt", layers=2, heads=2, dim=32, tie_weights=False, bias=False),
            DataSpec(vocab_size=50, context=16),
        ),
        (sections.Vit(name="vit", patch=8, layers=2, heads=2, dim=32), IMAGES),
        (sections.ResNet(name="resnet18", width=8), IMAGES),
        (sections.Mlp(name="mlp"), IMAGES),
        (sections.SimpleCnn(name="simple_cnn"), IMAGES),
        (sections.Lstm(name="lstm"), DataSpec(vocab_size=50, num_classes=4)),
    ],
    ids=["gpt", "gpt_untied", "vit", "resnet18", "mlp", "simple_cnn", "lstm"],
)
def test_every_shipped_model(section, spec):
    check(lambda: build_model(section, spec))


def test_models_of_transformers():
    transformers = pytest.importorskip("transformers")
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    gpt2 = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=99, n_positions=32, **ids)
    bert = transformers.BertConfig(vocab_size=99, **size)
    vit = transformers.ViTConfig(image_size=32, **size)
    resnet = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    llama = transformers.LlamaConfig(vocab_size=99, num_key_value_heads=2, **size)
    check(lambda: transformers.GPT2LMHeadModel(gpt2))
    check(lambda: transformers.BertForSequenceClassification(bert))
    check(lambda: transformers.ViTForImageClassification(vit))  # by trunc_normal_
    check(lambda: transformers.ResNetForImageClassification(resnet))
    check(lambda: transformers.LlamaForCausalLM(llama))
    # Under another default dtype, which operations that are not told one go by.
    check(lambda: transformers.AutoModelForCausalLM.from_config(gpt2, dtype=torch.bfloat16))


class Model(nn.Module):
    """A module that a function fills."""

    def __init__(self, fill: Callable[[nn.Module], object]) -> None:
        super().__init__()
        fill(self)


def linear() -> nn.Linear:
    return nn.Linear(6, 5)


def buffers(model):
    model.register_buffer("listed", torch.tensor([1.0, 2.0]))
    model.register_buffer("scaled", torch.tensor([1.0, 2.0]) * 3)
    model.register_buffer("numpy", torch.from_numpy(np.random.rand(4)))
    model.register_buffer("numpy_as", torch.as_tensor(np.random.rand(4)).float() + 1)
    model.register_buffer("python", torch.tensor([random.random()]))
    model.register_buffer("mask", torch.tril(torch.ones(5, 5)).bool(), persistent=False)
    model.register_buffer("drawn", torch.bernoulli(torch.full((20,), 0.5)))
    model.register_buffer("permuted", torch.randperm(9))
    model.register_buffer("none", None)
    model.register_buffer("number", torch.tensor(7))
    model.listed.mul_(3)  # a constant of the constructor, which must stay what it is for the next time


def initialised(model):
    for name, shape in {"tall": (7, 4), "wide": (4, 7), "row": (1, 4), "cube": (3, 2, 2)}.items():
        setattr(model, name, nn.Parameter(torch.empty(shape)))
        nn.init.orthogonal_(getattr(model, name), gain=2.0)
    for name, options in {
        "cut": {},
        "narrow": {"std": 0.02, "a": -0.01, "b": 0.01},
        "rare": {"std": 0.02, "a": 0.03, "b": 0.05},
    }.items():
        setattr(model, name, nn.Parameter(torch.empty(5, 4)))
        nn.init.trunc_normal_(getattr(model, name), **options)
    model.sparse = nn.Parameter(torch.empty(8, 4))
    nn.init.sparse_(model.sparse, 0.3)
    model.part = nn.Parameter(torch.zeros(6, 4))
    nn.init.trunc_normal_(model.part[1:3])


def by_hand(model):
    model.embedding = nn.Embedding(5, 4, padding_idx=0)
    model.embedding.weight.data.normal_()
    model.embedding.weight.data[1:3] = 2
    model.embedding.weight.data[3].zero_()
    model.linear = linear()
    model.linear.weight.data = torch.randn(7, 7)
    model.linear.bias.data = model.linear.bias.data[:2]
    model.turned = nn.Parameter(torch.randn(3, 4).t())
    model.joined = nn.Parameter(torch.cat([torch.randn(2, 3), torch.zeros(1, 3)]))
    model.of_more = nn.Parameter(torch.randn(6)[1:4])
    model.empty = nn.Parameter(torch.zeros(0, 3))
    model.scalar = nn.Parameter(torch.tensor(1.5))


def shared(model):
    model.first, model.second, model.third = linear(), linear(), linear()
    model.second.weight = model.first.weight
    nn.init.normal_(model.second.weight)
    model.third.weight = nn.Parameter(model.first.weight.data)  # another parameter in the same memory
    model.third.weight.data.mul_(2)
    model.wide = nn.Parameter(torch.randn(1, 4).expand(3, 4))
    model.module = model.alias = nn.BatchNorm1d(3)
    model.register_buffer("mask", torch.ones(2))
    model.first.register_buffer("mask", model.mask)


def copied(model):
    model.layers = nn.ModuleList(copy.deepcopy(linear()) for _ in range(2))
    model.target = copy.deepcopy(model.layers[0])
    nn.init.normal_(model.layers[0].weight)
    model.other = linear()
    model.other.load_state_dict(model.target.state_dict())
    nn.init.xavier_uniform_(model.target.weight)


def tried_out(model):
    """A forward pass in the constructor, to find out sizes: it moves statistics and draws."""
    model.conv, model.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
    out = nn.functional.dropout(model.norm(model.conv(torch.randn(2, 3, 8, 8))))
    model.head = nn.Linear(out.flatten(1).shape[1], 3)


def constants(model):
    model.rates = [torch.tensor(rate).item() for rate in (0.1, 0.2)]  # not random, so its value is known
    model.linear = linear()


@pytest.mark.parametrize("fill", [buffers, initialised, by_hand, shared, copied, tried_out, constants])
def test_whatever_a_constructor_does(fill):
    check(lambda: Model(fill))


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.LSTM(4, 5, 2, bidirectional=True, proj_size=3),
        lambda: nn.Transformer(8, 2, 2, 2, 16),  # layers are deep-copied, then initialised
        lambda: nn.MultiheadAttention(8, 2, kdim=4, vdim=4),
        lambda: nn.utils.parametrizations.spectral_norm(linear()),
        lambda: nn.utils.parametrizations.orthogonal(linear()),
        lambda: nn.utils.parametrizations.weight_norm(linear()),
        lambda: nn.ParameterList([torch.randn(2), torch.randn(3)]),
    ],
    ids=["lstm", "transformer", "attention", "spectral", "orthogonal", "weight_norm", "list"],
)
def test_modules_of_torch(build):
    check(build)


def test_a_deferred_lstm_computes_with_its_own_weights():
    torch.manual_seed(3)
    deferred = Deferred(lambda: nn.LSTM(4, 5))
    assert deferred.model._flat_weights == list(deferred.model.parameters())


def test_what_is_noted_on_a_parameter_is_kept():
    def note(model):
        model.linear = linear()
        model.linear.weight.no_decay = True
        model.linear.bias.requires_grad_(False)
        model.frozen = linear().requires_grad_(False)
        model.tied = linear()
        model.tied.weight = model.linear.weight

    deferred, _ = check(lambda: Model(note))
    model = deferred.model
    assert model.linear.weight.no_decay and model.tied.weight is model.linear.weight
    assert not hasattr(model.linear.bias, "no_decay")
    assert "fake_mode" not in vars(model.linear.weight)
    assert [name for name, p in model.named_parameters() if p.requires_grad] == ["linear.weight", "tied.bias"]


OUTSIDE = torch.ones(3)


def test_a_tensor_from_outside_is_handed_over_as_it_is():
    deferred, _ = check(lambda: Model(lambda model: (model.register_buffer("outside", OUTSIDE), linear())))
    assert torch.equal(OUTSIDE, torch.ones(3)) and not OUTSIDE.is_meta
    assert dict(deferred.weights())["outside"].data_ptr() == OUTSIDE.data_ptr()


def of_own_generator(model):
    model.weight = nn.Parameter(torch.empty(4).normal_(generator=torch.Generator().manual_seed(1)))


def cut_by_own_generator(model):
    model.weight = nn.Parameter(torch.empty(4))
    nn.init.trunc_normal_(model.weight, generator=torch.Generator().manual_seed(1))


def seeds(model):
    model.first = linear()
    torch.manual_seed(7)
    model.second = linear()


def seeds_last(model):
    model.first = linear()
    torch.manual_seed(7)


def goes_back(model):
    model.first = linear()
    with torch.random.fork_rng():
        model.second = linear()
    model.third = linear()


def goes_back_by_hand(model):
    state = torch.get_rng_state()
    model.first = linear()
    torch.set_rng_state(state)
    nn.init.trunc_normal_(model.first.weight)


def holds_a_tensor(model):
    model.linear = linear()
    model.child = nn.Module()
    model.child.scales = [torch.tensor(0.5)]


def conjugates(model):
    model.register_buffer("turns", torch.polar(torch.ones(3), torch.rand(3)).conj())


def on_meta(model):
    model.weight = nn.Parameter(torch.empty(3, device="meta"))


def of_own_memory(model):
    model.weight = nn.Parameter(torch.empty(0).set_(torch.arange(3.0).untyped_storage(), 0, (3,), (1,)))


def on_gpu(model):
    model.weight = nn.Parameter(torch.zeros(3, device="cuda"))


@pytest.mark.parametrize(
    ("fill", "why"),
    [
        (lambda model: torch.rand(3)[0].item(), "DataDependentOutputException"),
        (lambda model: torch.nonzero(torch.rand(3)), "DynamicOutputShapeException"),
        (lambda model: linear().weight.detach().numpy(), "numpy"),
        (lambda model: OUTSIDE + 1, "convert all Tensors to FakeTensors"),
        (lambda model: 1 / 0, "ZeroDivisionError: division by zero"),
        (of_own_generator, "a generator of its own"),
        (cut_by_own_generator, "a generator of its own"),
        (seeds, "sets the seed or the state of torch's random generator"),
        (seeds_last, "sets the seed or the state of torch's random generator"),
        (goes_back, "sets the seed or the state of torch's random generator"),
        (goes_back_by_hand, "sets the seed or the state of torch's random generator"),
        (holds_a_tensor, r"^child\.scales is a tensor, and no parameter or buffer$"),
        (conjugates, "conjugate"),
        (on_meta, "without values"),
        (on_gpu, "on cuda"),
        (of_own_memory, "sets the memory of a tensor"),
    ],
)
def test_what_cannot_be_deferred_is_refused_and_leaves_nothing(fill, why):
    refused(fill, why)


def refused(fill: Callable[[nn.Module], object], why: str) -> None:
    state, patched = torch.get_rng_state(), nn.init._no_grad_trunc_normal_
    with pytest.raises(CannotDeferError, match=why):
        Deferred(lambda: Model(fill))
    assert nn.init._no_grad_trunc_normal_ is patched
    assert torch.equal(torch.get_rng_state(), state)
    assert not isinstance(torch.empty(1), FakeTensor)


def test_torch_does_not_tell_of_a_refusal_at_length(caplog):
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.addHandler(caplog.handler)
    refused(lambda model: torch.ones(2) + torch.ones(3), "RuntimeError: Attempting to broadcast")
    logger.removeHandler(caplog.handler)
    assert caplog.records == [], "it has a traceback to show, of an error that comes again in memory"
    assert not logger.disabled


def test_weights_from_files_are_not_taken_for_others(tmp_path):
    """torch.load gives fake tensors here, without what is in the file."""
    torch.save(linear().state_dict(), tmp_path / "weights.pt")
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(linear().state_dict(), tmp_path / "weights.safetensors")
    for read in (
        lambda: torch.load(tmp_path / "weights.pt"),
        lambda: torch.load(tmp_path / "weights.pt", mmap=True),
        lambda: safetensors.load_file(tmp_path / "weights.safetensors"),
        lambda: safetensors.load((tmp_path / "weights.safetensors").read_bytes()),
    ):
        for assign in (False, True):
            refused(lambda model, read=read, assign=assign: linear().load_state_dict(read(), assign=assign), r"\w")


def test_a_users_error_comes_through_and_leaves_nothing():
    patched = nn.init._no_grad_trunc_normal_

    def fails() -> nn.Module:
        nn.Linear(3, 3)
        raise UserError("model.dim: 7 is odd")

    with pytest.raises(UserError, match=r"^model\.dim: 7 is odd$"):
        Deferred(fails)
    with pytest.raises(KeyboardInterrupt):
        Deferred(lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
    assert nn.init._no_grad_trunc_normal_ is patched and not isinstance(torch.empty(1), FakeTensor)


PEAK = """
import resource, sys, torch
from shoal.core.deferred import Deferred
from shoal.models.gpt import Gpt
torch.set_num_threads(1)
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
def build(layers, dim): return lambda: Gpt(50304, 128, layers=layers, heads=4, dim=dim)
for _ in Deferred(build(1, 8)).weights(): pass  # what torch loads when it first computes
before = peak()
deferred = Deferred(build(8, 768))
after_building = peak()
total = sum(whole.numel() for name, whole in deferred.weights())
print(total, after_building - before, peak() - before)
"""


def test_never_much_more_than_the_largest_tensor_is_in_memory():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    found = subprocess.run(
        [sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, env=environment, timeout=300
    )
    parameters, building_mib, peak_mib = (float(number) for number in found.stdout.split())
    assert parameters > 95e6
    largest_mib = 50304 * 768 * 4 / 2**20
    assert building_mib < 30
    assert peak_mib < largest_mib * 1.3, "of 365 MiB in all"


def test_a_model_with_a_hook_on_a_gradient_is_built_in_memory() -> None:
    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        model.weight.register_hook(lambda gradient: gradient)
        return model

    with pytest.raises(CannotDeferError, match="weight has a hook on its gradient"):
        Deferred(build)


def test_another_model_that_is_kept_beside_it_is_noticed() -> None:
    kept: dict[str, object] = {"name": "student", "sizes": [2, 2]}

    def build() -> nn.Module:
        model = nn.Linear(2, 2)
        kept["teachers"] = [nn.Linear(2, 2)]
        return model

    Deferred(build)
    with pytest.raises(CannotDeferError, match="teachers holds another one"):
        check_others(kept)
    check_others({"name": "student"})
