"""Models that are not ours: the user's own function, torchvision's, transformers'."""

import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from shoal.core.errors import UserError
from shoal.core.imports import load_object, require
from shoal.core.section import nearest, one_of
from shoal.core.spec import DataSpec
from shoal.models import section as sections
from shoal.models.needs import describe_data, divisors

FIELD = "model.name"


def build_external(section: sections.CustomModel, spec: DataSpec) -> nn.Module:
    """The model behind `torchvision:NAME`, `transformers:CLASS` or the user's `module:function`."""
    library, _, name = section.name.partition(":")
    if library == "torchvision":
        return build_torchvision(name, section.args, spec)
    if library == "transformers":
        return build_transformers(name, section.args, spec)
    return build_custom(section.name, section.args, spec)


def build_custom(reference: str, args: dict[str, Any], spec: DataSpec) -> nn.Module:
    """What the user's `module:function` returns for `args`, and for `spec` if it has a parameter of that name."""
    function = load_object(reference, FIELD)
    if isinstance(function, nn.Module) or not callable(function):
        raise UserError(
            f"{FIELD}: {reference} is a {type(function).__name__}; allowed: a function or class that makes the model"
        )
    given = dict(args)
    signature = _signature(function)
    if signature is not None:
        if "spec" in signature.parameters:
            given.setdefault("spec", spec)
        _check_arguments(reference, signature, given)
    model = function(**given)
    if not isinstance(model, nn.Module):
        raise UserError(f"{FIELD}: {reference} returned a {type(model).__name__}; allowed: a torch.nn.Module")
    return model


def build_torchvision(name: str, args: dict[str, Any], spec: DataSpec) -> nn.Module:
    """torchvision's model of that name, untrained, with the data's number of classes."""
    models = _torchvision_models()
    try:
        builder = models.get_model_builder(name)
    except ValueError as error:
        hint = _did_you_mean(name, models.list_models())
        raise UserError(f"{FIELD}: torchvision has no model {name!r}; allowed: its list_models(){hint}") from error
    given = {"weights": None, **args}
    if spec.num_classes is not None:
        given.setdefault("num_classes", spec.num_classes)
    _check_arguments(f"torchvision:{name}", inspect.signature(builder), given)
    try:
        model: nn.Module = builder(**given)
    except (TypeError, ValueError) as error:
        # The builders take **kwargs, so that a wrong name comes up only in the class behind them.
        raise UserError(f"model.args: torchvision:{name} does not take {_listed(args)}: {error}") from error
    return model


def build_transformers(name: str, args: dict[str, Any], spec: DataSpec) -> nn.Module:
    """transformers' model class of that name, untrained, its configuration filled from `spec` and `args`."""
    transformers = require("transformers", FIELD, "transformers")
    try:
        model_class = getattr(transformers, name, None)
    except ImportError as error:
        # Its classes are imported on first use, and then fail beside a torchvision that does not fit torch.
        reason = error.__cause__ or error
        raise UserError(f"{FIELD}: transformers:{name} cannot be imported here: {reason}") from error
    if model_class is None:
        raise UserError(f"{FIELD}: transformers has no class {name!r}{_did_you_mean(name, dir(transformers))}")
    config_class = getattr(model_class, "config_class", None)
    if config_class is None or not isinstance(model_class, type) or not issubclass(model_class, nn.Module):
        raise UserError(
            f"{FIELD}: transformers:{name} is not a model class with a configuration; "
            "allowed: classes such as ViTForImageClassification, BertForSequenceClassification, GPT2LMHeadModel"
        )
    _check_inputs(name, model_class, spec)
    defaults = config_class()
    _check_config_arguments(name, args, defaults)
    given = {**_config_from_spec(defaults, args, spec), **args}
    try:
        config = config_class(**given)
        _check_patch(config, spec)
        model = model_class(config)
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"model.args: transformers:{name} does not accept {_listed(given)}: {error}") from error
    return Logits(model, padded=spec.vocab_size is not None and spec.num_classes is not None)


class Logits(nn.Module):
    """A transformers model that takes one tensor and returns its logits, as the built-in models do."""

    def __init__(self, model: nn.Module, padded: bool = False) -> None:
        super().__init__()
        self.model = model
        self.padded = padded

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Images or token ids -> the logits of the wrapped model; padding (id 0) is kept out of the attention."""
        output = self.model(inputs, attention_mask=inputs.ne(0)) if self.padded else self.model(inputs)
        logits = getattr(output, "logits", None)
        if not isinstance(logits, torch.Tensor):
            raise UserError(
                f"{FIELD}: transformers:{type(self.model).__name__} gives no logits; "
                "allowed: classes with a head, such as ...ForImageClassification, ...ForSequenceClassification"
            )
        return logits


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None  # Some callables written in C do not say; they complain themselves when called.


def _check_arguments(reference: str, signature: inspect.Signature, given: dict[str, Any]) -> None:
    parameters = signature.parameters.values()
    by_name = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [name for name in given if name not in by_name]
    if unknown and not open_ended:
        allowed = one_of(unknown[0], by_name) if by_name else "allowed: none, it takes no arguments"
        raise UserError(f"model.args: {unknown[0]!r} is not an argument of {reference}; {allowed}")
    try:
        signature.bind(**given)
    except TypeError as error:
        raise UserError(f"model.args: {reference}: {error}; allowed: {', '.join(sorted(by_name))}") from error


def _torchvision_models() -> Any:
    try:
        return require("torchvision.models", FIELD, "torchvision")
    except RuntimeError as error:
        # A CUDA build beside a CPU torch is found but fails while it registers its operators.
        raise UserError(
            f"{FIELD}: the installed torchvision does not work with torch {torch.__version__} ({error}); "
            "install both from one index, as https://pytorch.org/get-started says, or choose a built-in model"
        ) from error


def _check_inputs(name: str, model_class: type[nn.Module], spec: DataSpec) -> None:
    expected = getattr(model_class, "main_input_name", None)
    gives_images, gives_text = spec.image_shape is not None, spec.vocab_size is not None
    if (expected == "pixel_values" and gives_text) or (expected == "input_ids" and gives_images):
        needed = "images" if expected == "pixel_values" else "text"
        raise UserError(f"{FIELD}: transformers:{name} needs {needed}, but the data gives {describe_data(spec)}")


def _check_config_arguments(name: str, args: dict[str, Any], defaults: Any) -> None:
    """transformers keeps arguments it does not know as attributes, so a misspelt one would be lost in silence."""
    known = {key for key in defaults.to_dict() if not key.startswith("_")} | set(defaults.attribute_map)
    # Taken by every configuration but not among what it prints.
    known |= {"num_labels", "attn_implementation", "rope_theta", "rope_scaling"}
    for argument in args:
        if argument not in known:
            raise UserError(
                f"model.args: {argument!r} is not a setting of {type(defaults).__name__} (transformers:{name}); "
                f"{one_of(argument, known)}"
            )


def _check_patch(config: Any, spec: DataSpec) -> None:
    """transformers drops the pixels that fill no patch, and fails in the first step where none is filled."""
    patch = getattr(config, "patch_size", None)
    if spec.image_shape is None or not isinstance(patch, int):
        return
    _, height, width = spec.image_shape
    if height % patch or width % patch:
        raise UserError(
            f"model.args: patch_size {patch} does not divide the image's {height}x{width} pixels; "
            f"allowed: {divisors(math.gcd(height, width))}"
        )


def _config_from_spec(defaults: Any, args: dict[str, Any], spec: DataSpec) -> dict[str, Any]:
    """The settings that the data decides, where the configuration has them and the user did not set them."""
    channels, size = None, None
    if spec.image_shape is not None:
        channels, height, width = spec.image_shape
        size = height if height == width else (height, width)
    wanted = {
        "num_labels": None if "id2label" in args else spec.num_classes,
        "num_channels": channels,
        "image_size": size,
        "vocab_size": spec.vocab_size,
        "n_positions": spec.context,
        "max_position_embeddings": spec.context,
        # Padded texts of some classifiers (GPT2ForSequenceClassification) are refused without it.
        "pad_token_id": 0 if spec.vocab_size is not None and spec.num_classes is not None else None,
        # Keys and values are kept for generation; in training they are memory for nothing.
        "use_cache": False,
    }
    renamed = defaults.attribute_map
    taken = {renamed.get(name, name) for name in args}
    filled: dict[str, Any] = {}
    for name, value in wanted.items():
        own_name = renamed.get(name, name)
        if value is not None and hasattr(defaults, own_name) and own_name not in taken:
            filled[own_name] = value
    return filled


def _did_you_mean(name: str, allowed: Iterable[str]) -> str:
    guess = nearest(name, allowed)
    return f"; did you mean {guess}?" if guess else ""


def _listed(args: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in args.items()) or "no arguments"
