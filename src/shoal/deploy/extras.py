"""What a recipe needs beside Shoal's own packages, for machines that are made for it."""

from shoal.core.remote import EXTRAS
from shoal.data.section import ImageFolder, TextShards
from shoal.recipe.schema import Recipe


def extras(recipe: Recipe) -> list[str]:
    """Which of Shoal's extras a recipe needs; what code of your own needs does not show."""
    found = set(recipe.track.sinks)  # each is called as its extra
    for address in (recipe.checkpoint.upload_to or "", getattr(recipe.data, "dir", "")):
        scheme, is_address, _ = address.partition("://")
        if is_address and scheme in EXTRAS:
            found.add(EXTRAS[scheme])
    if isinstance(recipe.data, ImageFolder):
        found.add("images")
    if isinstance(recipe.data, ImageFolder | TextShards):
        found.add("parquet")  # which their shards may be
    if getattr(recipe.data, "tokenizer", "bytes") not in ("bytes", "chars"):
        found.add("text")
    if recipe.data is not None and recipe.data.loader == "ray":
        found.add("ray")
    if recipe.parallel.strategy == "deepspeed":
        found.add("deepspeed")
    library = recipe.model.name.partition(":")[0] if recipe.model is not None else ""
    return sorted(found | ({library} & {"torchvision", "transformers"}))
