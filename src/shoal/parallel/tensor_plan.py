"""How a model says in plain words which of its layers workers share.

A model hands over its plan as an attribute `shoal_tensor`: a word for each of some submodules, where `*` stands for any
one part of a name. Each worker has its part of their weights; what the plan does not name, every worker has and
computes whole. Activations are `[batch, tokens, features]`. Between layers they are whole on every worker; or, with
sequence parallel, each worker has those of its own tokens alone, from a `split` on. What computes with those must be
named, down to the last parameter: the gradients that a worker has of it are of its own tokens too.

A model with attention says `heads`, how many there are, and one whose batches all have the same number of tokens
`num_tokens`: without it, there is no sequence parallel.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from shoal.core.errors import UserError
from shoal.parallel.ties import tied_names

WORDS = {
    "vocabulary": "an nn.Embedding; each worker has some of its rows. What comes out is whole",
    "split": "of what it gives, each worker keeps its own tokens",
    "tokens": "treats every token by itself, as norms and dropout do; each worker its own. May be said of a parameter",
    "gather": "the first thing that it is given is made whole",
    "columns": "an nn.Linear inside of a `gather`; each worker computes some of its outputs",
    "heads": "draws random numbers for what a worker has of the features",
    "rows": "an nn.Linear; each worker has those inputs of it that `columns` gave. It gives each worker its own tokens",
    "join": "as `tokens`; what it gives is made whole",
    "logits": "an nn.Linear; each worker computes some of its outputs for all tokens. What comes out is whole",
}
"""What a plan may say of a submodule. Where tokens are not divided, to keep one's own is to keep all."""

_KINDS: dict[str, type[nn.Module]] = {
    "vocabulary": nn.Embedding,
    "columns": nn.Linear,
    "rows": nn.Linear,
    "logits": nn.Linear,
}
_DIVIDED = {"vocabulary": 0, "columns": 0, "logits": 0, "rows": 1}
"""Along which dimension a layer's weight is."""


@dataclass(frozen=True)
class Plan:
    """A model's own plan, checked against it."""

    words: Mapping[str, str]
    """By the full name of a submodule."""
    of_tokens: frozenset[str]
    """Parameters that treat every token by itself."""
    size: int
    """Workers that share every layer."""
    num_tokens: int | None

    @property
    def can_divide_tokens(self) -> bool:
        """Whether every worker can have as many of them."""
        return self.size > 1 and self.num_tokens is not None and self.num_tokens % self.size == 0


def read_plan(model: nn.Module, size: int, workers: int) -> Plan:
    """The plan of a model, which may be on the meta device.

    Args:
        model: With an attribute `shoal_tensor`.
        size: Workers that share every layer.
        workers: All that there are.

    Raises:
        UserError: If it has none, or a wrong one, or its layers cannot be divided by `size`.
    """
    given = getattr(model, "shoal_tensor", None)
    if given is None:
        raise UserError(
            "parallel.strategy: tensor needs a model that says how its layers are divided (shoal_tensor), as gpt and "
            f"vit do, and {type(model).__name__} does not; nearest that works: fsdp"
        )
    if not isinstance(given, Mapping):
        raise UserError(f"model.name: shoal_tensor of {type(model).__name__} should map names of submodules to words")
    words: dict[str, str] = {}
    of_tokens: set[str] = set()
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters(remove_duplicate=False))
    for pattern, word in given.items():
        found = [name for name in modules if _matches(name, pattern)]
        alone = [name for name in parameters if word == "tokens" and _matches(name, pattern)]
        _check_entry(model, pattern, word, [modules[name] for name in found], bool(alone))
        words |= dict.fromkeys(found, word)
        of_tokens |= set(alone)
    for name, word in words.items():
        if word in ("tokens", "join"):
            of_tokens |= {f"{name}.{own}" for own, _ in modules[name].named_parameters()}
    _check_ties(model, words, of_tokens)
    _check_size(model, {name: modules[name] for name in words}, words, size, workers)
    return Plan(words, frozenset(of_tokens), size, getattr(model, "num_tokens", None))


def _matches(name: str, pattern: str) -> bool:
    parts, patterns = name.split("."), pattern.split(".")
    return len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns))


def _check_entry(model: nn.Module, pattern: str, word: str, found: list[nn.Module], is_parameter: bool) -> None:
    where = f"model.name: shoal_tensor of {type(model).__name__}"
    if str(word) not in WORDS:
        near = get_close_matches(str(word), WORDS, 1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise UserError(f"{where} says {word!r} of {pattern!r}; {hint}allowed: {', '.join(WORDS)}")
    if not found and not is_parameter:
        raise UserError(
            f"{where} names {pattern!r}, which is no submodule; allowed: the names that model.named_modules() gives"
        )
    kind = _KINDS.get(word, nn.Module)
    if wrong := next((module for module in found if not isinstance(module, kind)), None):
        raise UserError(
            f"{where} says {word!r} of {pattern!r}, which must be an nn.{kind.__name__}, not {type(wrong).__name__}"
        )
    for module in found if word == "vocabulary" else ():
        assert isinstance(module, nn.Embedding)
        if module.max_norm or module.scale_grad_by_freq or module.sparse:
            raise UserError(
                f"{where} says {word!r} of {pattern!r}, an nn.Embedding with max_norm, scale_grad_by_freq or sparse, "
                "which cannot be divided; leave these out, or this word"
            )


def _check_ties(model: nn.Module, words: Mapping[str, str], of_tokens: set[str]) -> None:
    """What is one parameter must be divided in one way."""

    def way(name: str) -> tuple[int | None, bool]:
        return _DIVIDED.get(words.get(name.rpartition(".")[0], "")), name in of_tokens

    for first, *others in tied_names(model):
        for other in others:
            if way(first) != way(other):
                raise UserError(
                    f"model.name: shoal_tensor of {type(model).__name__} divides {first} and {other} in different "
                    "ways, and they are one tied weight; say 'vocabulary' and 'logits' of them, or untie them"
                )


def _check_size(
    model: nn.Module, modules: Mapping[str, nn.Module], words: Mapping[str, str], size: int, workers: int
) -> None:
    """Each worker must have as much of a layer as the others, and something of a vocabulary."""
    heads = getattr(model, "heads", 0)
    numbers = {"heads": heads if isinstance(heads, int) else 0}
    for name, module in modules.items():
        if words[name] in ("columns", "rows"):
            assert isinstance(module, nn.Linear)
            features = module.out_features if words[name] == "columns" else module.in_features
            numbers[f"features of {name}"] = features
        if words[name] in ("vocabulary", "logits"):
            assert isinstance(module, nn.Embedding | nn.Linear)
            rows = module.weight.shape[0]
            if -(-rows // size) * (size - 1) >= rows:
                raise UserError(
                    f"parallel.tensor.size: {size} workers cannot all have one of the {rows} rows of {name}; "
                    "set fewer, or use parallel.strategy fsdp"
                )
    if what := next((name for name, number in numbers.items() if number % size), None):
        shared = math.gcd(workers, *numbers.values())
        works = ", ".join(str(number) for number in range(2, shared + 1) if shared % number == 0)
        nearest = f"sizes that work with {workers} workers: {works}" if works else "use parallel.strategy fsdp"
        raise UserError(
            f"parallel.tensor.size: {size} workers cannot have equal shares of the model's {numbers[what]} {what}; "
            f"{nearest}"
        )
