import hashlib

import pytest
import torch
from torch import nn

from shoal.core.weights import named_weights, weights_sha256


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def test_weights_are_parameters_and_persistent_buffers_with_tied_ones_once() -> None:
    model = Tied()
    weights = named_weights(model)
    assert set(weights) == {"embed.weight"} | {
        f"norm.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert not any(tensor.requires_grad for tensor in weights.values())
    assert weights["embed.weight"].data_ptr() == model.embed.weight.data_ptr()


def test_the_hash_is_over_name_type_shape_and_bytes_in_the_order_of_names() -> None:
    weights = {
        "b": torch.tensor([1.0, -2.0]),
        "a": torch.tensor([[1, 2], [3, 4]]),
        "c": torch.tensor(1.5, dtype=torch.bfloat16),
        "d": torch.tensor([True, False]),
        "e": torch.empty(0, 3),
    }
    digest = hashlib.sha256()
    for part in (
        b"a:torch.int64:(2, 2)\n" + bytes([1, *[0] * 7, 2, *[0] * 7, 3, *[0] * 7, 4, *[0] * 7]),
        b"b:torch.float32:(2,)\n" + bytes.fromhex("0000803f000000c0"),
        b"c:torch.bfloat16:()\n" + bytes.fromhex("c03f"),
        b"d:torch.bool:(2,)\n" + bytes([1, 0]),
        b"e:torch.float32:(0, 3)\n",
    ):
        digest.update(part)
    assert weights_sha256(weights) == digest.hexdigest()


def test_neither_memory_layout_nor_order_nor_gradients_change_the_hash() -> None:
    weight = torch.randn(4, 6)
    plain = weights_sha256({"a": weight, "b": torch.ones(2)})
    strided = weight.t().contiguous().t()
    assert strided.stride() != weight.stride()
    assert weights_sha256({"b": torch.ones(2), "a": strided.requires_grad_()}) == plain


@pytest.mark.parametrize(
    "other",
    [
        {"x": torch.tensor([1.0, 2.0])},
        {"w": torch.tensor([1.0, 2.0000002])},
        {"w": torch.tensor([[1.0, 2.0]])},
        {"w": torch.tensor([1.0, 2.0]).view(torch.int32)},
        {"w": torch.tensor([1.0, 2.0]), "v": torch.empty(0)},
        {},
    ],
    ids=["name", "one bit", "shape", "type", "one more", "none"],
)
def test_any_difference_changes_the_hash(other: dict[str, torch.Tensor]) -> None:
    assert weights_sha256(other) != weights_sha256({"w": torch.tensor([1.0, 2.0])})
