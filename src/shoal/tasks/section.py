"""The `task:` section: what is learned, chosen by `name`. Loads without torch."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from shoal.core.section import CUSTOM, Section, name_tag


class Classification(Section):
    """One class per sample, by cross-entropy; reports loss and accuracy."""

    name: Literal["image_classification", "text_classification"]
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target spread evenly over all classes (in training; validation loss is always plain)."""


class LanguageModelling(Section):
    """The next token, by cross-entropy over every token; reports loss and perplexity."""

    name: Literal["language_modelling"]
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target spread evenly over the vocabulary (in training; validation loss is always plain)."""


class CustomTask(Section):
    """Your own `module:Class`; see docs/your-own-task.md."""

    name: Annotated[str, Field(pattern=r"^[\w.]+:[\w.]+$")]
    args: dict[str, Any] = {}
    """Keyword arguments of the class."""


METRICS = {
    "image_classification": ("val_loss", "val_accuracy"),
    "text_classification": ("val_loss", "val_accuracy"),
    "language_modelling": ("val_loss", "val_perplexity"),
}
"""What evaluation of a shipped task reports; your own task's names are known once it has run."""

TaskSection = Annotated[
    Annotated[Classification, Tag("image_classification")]
    | Annotated[Classification, Tag("text_classification")]
    | Annotated[LanguageModelling, Tag("language_modelling")]
    | Annotated[CustomTask, Tag(CUSTOM)],
    Discriminator(name_tag),
]
