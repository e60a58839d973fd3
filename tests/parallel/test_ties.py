from torch import nn

from shoal.models.gpt import Gpt
from shoal.parallel.ties import tie_again, tied_names


def test_what_was_one_parameter_is_one_again() -> None:
    model = Gpt(11, 4, layers=1, heads=1, dim=4)
    assert tied_names(model) == [["token_embedding.weight", "head.weight"]]
    ties = tied_names(model)
    model.to_empty(device="meta")  # which replaces one after the other
    assert model.head.weight is not model.token_embedding.weight
    tie_again(model, ties)
    assert model.head.weight is model.token_embedding.weight
    assert tied_names(nn.Linear(2, 2)) == []
