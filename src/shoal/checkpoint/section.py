"""The `checkpoint:` section. Loads without torch."""

from typing import Annotated, Literal

from pydantic import Field

from shoal.core.section import Section


class CheckpointSection(Section):
    """When state is saved, what is kept, and where to. The last step is always saved, and so is the step of an
    interruption."""

    every_steps: Annotated[int, Field(gt=0)] | None = None
    """Save every so many steps; null saves at the end of each epoch."""
    keep_last: Annotated[int, Field(gt=0)] = 2
    """Newest checkpoints to keep."""
    keep_best: Annotated[int, Field(ge=0)] = 0
    """Best checkpoints to keep besides, by `metric`."""
    metric: str | None = None
    """What `keep_best` goes by, for example val_accuracy; needed when `keep_best` is above 0."""
    mode: Literal["auto", "min", "max"] = "auto"
    """Whether less or more is better; `auto` goes by the metric's name where that tells."""
    if_busy: Literal["wait", "supersede"] = "wait"
    """What a save does while the one before is still being written: `wait` for it, or `supersede` it, which is then
    dropped; never two in a row, so that one is always finished."""
    upload_to: Annotated[str, Field(pattern=r"^[a-z0-9+]+://\S+$")] | None = None
    """Where checkpoints are copied to besides, in the background: s3://bucket/folder, gs://..., az://..., or
    file:///folder. A folder of the run's name is made there."""
    upload_timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """How long the store may leave a request without an answer before it is tried again."""
    encryption: Literal["AES256", "aws:kms", "aws:kms:dsse"] | None = None
    """Encryption at rest that S3 is asked for; null leaves it to the bucket."""
    kms_key: str | None = None
    """The key's id or ARN for `encryption: aws:kms`; null takes the account's own."""
    max_failures: Annotated[int, Field(gt=0)] = 5
    """Saves, or uploads, that may fail in a row before the run is stopped. Each has been tried several times."""
    give_up_after_s: Annotated[float, Field(ge=0)] = 300.0
    """How long the last save and the last upload of a run are tried again on a full disk or a store that fails, before
    the run ends without them."""
