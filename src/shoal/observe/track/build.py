"""The followers that a `track:` section asks for."""

import hashlib
from collections.abc import Callable
from pathlib import Path

from shoal.core.secrets import scrub
from shoal.observe.track.follow import Follower
from shoal.observe.track.progress import Progress
from shoal.observe.track.section import MlflowSection, OtlpSection, TensorBoardSection, TrackSection, WandbSection
from shoal.observe.track.sink import Sink
from shoal.observe.track.to_mlflow import LogModel, MlflowSink, mlflow_uri
from shoal.observe.track.to_otlp import OtlpSink, otlp_endpoint
from shoal.observe.track.to_tensorboard import TensorBoardSink, tensorboard_dir
from shoal.observe.track.to_wandb import WandbSink, wandb_target

Hide = Callable[[str], str]


def target_of(name: str, section: TrackSection, run_dir: Path, hide: Hide) -> str:
    """What tells where a sink's copy is from elsewhere, in words that hold no secret."""
    place = scrub(_place(getattr(section, name), run_dir))
    hidden = hide(place)
    # By a reference alone, two servers that it has stood for would be one.
    return place if hidden == place else f"{hidden} {hashlib.sha256(place.encode()).hexdigest()[:8]}"


def _place(own: object, run_dir: Path) -> str:
    if isinstance(own, MlflowSection):
        return mlflow_uri(own, run_dir)
    if isinstance(own, TensorBoardSection):
        return str(tensorboard_dir(own, run_dir))
    if isinstance(own, WandbSection):
        return wandb_target(own)
    assert isinstance(own, OtlpSection)
    return otlp_endpoint(own)


def make_followers(
    run_dir: Path, section: TrackSection, say: Callable[[str], None], hide: Hide, log_model: LogModel | None = None
) -> list[Follower]:
    """One for each sink; none of them has done anything yet."""
    found = []
    for name in section.sinks:
        progress = Progress.read(run_dir, name, target_of(name, section, run_dir, hide))
        make = _maker(getattr(section, name), run_dir, progress, hide, log_model)
        found.append(Follower(name, run_dir, progress, make, section.every_s, say, hide))
    return found


def _maker(
    own: object, run_dir: Path, progress: Progress, hide: Hide, log_model: LogModel | None
) -> Callable[[], Sink]:
    def make() -> Sink:
        if isinstance(own, MlflowSection):
            return MlflowSink(own, run_dir, progress, hide, log_model)
        if isinstance(own, TensorBoardSection):
            return TensorBoardSink(own, run_dir)
        if isinstance(own, WandbSection):
            return WandbSink(own, run_dir)
        assert isinstance(own, OtlpSection)
        return OtlpSink(own, run_dir, progress)

    return make
