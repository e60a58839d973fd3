"""A search's folder: what it searches, its journal, its trials, its results.

SEARCH_DIR/
  search.yaml        the recipe, the space and how to search: all that a resume needs
  journal.jsonl      every proposal, result and decision
  trials/0007/       the run of trial 7; 0007-1 is what it went on as after it took over another's weights
  best.yaml          the recipe of the best trial
  trials.csv         a line a trial
  summary.json       what --json printed
  report.html
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from shoal.core.errors import UserError
from shoal.core.section import nearest
from shoal.core.storage import expand_home, write_atomically
from shoal.launch.run import check_is_new, new_run_dir
from shoal.observe.runs import by_beginning
from shoal.recipe.load import check_tree
from shoal.recipe.yaml_tree import read_yaml, to_yaml
from shoal.tune.domains import as_text
from shoal.tune.journal import NAME as JOURNAL
from shoal.tune.schedulers.build import POPULATIONS
from shoal.tune.setup import Setup, make_setup, set_up
from shoal.tune.space import FIRST, SETTINGS, Space, parse_space
from shoal.tune.trial import Trial

ROOT = Path("searches")
SEARCH = "search.yaml"
_FREE = ("trials", "concurrency", "max_failed", "keep_checkpoints")
"""What a resume may change."""


class SearchFolder:
    """Where a search lives; one process at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock = FileLock(self.path / ".lock")

    def open(self) -> None:
        """Make it and be the only one who searches there."""
        try:
            (self.path / "trials").mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=2.0, poll_interval=0.1)
        except Timeout:
            raise UserError(
                f"--resume: {self.path} is being searched by another process; stop that one first"
            ) from None
        except OSError as error:
            raise UserError(f"--search-dir: {self.path} cannot be written: {error.strerror or error}") from error

    def close(self) -> None:
        """Let others."""
        self._lock.release(force=True)

    def run_dir(self, trial: Trial) -> Path:
        """Of a trial as it is now."""
        return self.path / "trials" / trial.name

    def write_setup(self, setup: Setup) -> None:
        """search.yaml, unless it is that already."""
        text, file = to_yaml(setup_tree(setup)), self.path / SEARCH
        try:
            if not file.is_file() or file.read_text(encoding="utf-8") != text:
                write_atomically(file, text)
        except OSError as error:
            raise UserError(f"--search-dir: {file} cannot be written: {error.strerror or error}; make room") from error


def setup_tree(setup: Setup) -> dict[str, Any]:
    """All that a search is, as search.yaml has it."""
    settings = setup.section.model_dump(mode="json")
    return {"recipe": setup.base.tree(), "space": space_tree(setup.space), SETTINGS: settings}


def space_tree(space: Space) -> dict[str, Any]:
    """The space as a file would have it."""
    tree: dict[str, Any] = {}
    for setting in space:
        text, condition = setting.domain.words(), setting.condition
        if condition is not None:
            values = ", ".join(map(as_text, condition.values))
            sign = "!=" if condition.is_negated else "in"
            text += f" if {condition.key} {sign} " + (values if condition.is_negated else f"({values})")
        tree[setting.key] = text
    return tree | ({FIRST: [dict(point) for point in space.first]} if space.first else {})


def find_search(name: str, root: Path = ROOT) -> Path:
    """The folder of a search given by path or by name; a unique beginning of the name is enough."""
    for path in (expand_home(name), root / name):
        if (path / SEARCH).is_file():
            return path
        if (path / "recipe.yaml").is_file():
            raise UserError(
                f"search {name!r}: this is a run, not a search; to go on with it: shoal train --resume {path}"
            )
    names = [path.parent.name for path in root.glob(f"*/{SEARCH}")]
    if (match := by_beginning("search", name, names)) is not None:
        return root / match
    guess = nearest(name, names)
    where = f"there are {', '.join(sorted(names)[:5])}" if names else f"no searches in {root.resolve()}"
    raise UserError(f"search {name!r}: not found; " + (f"did you mean {guess}?" if guess else where))


def prepare_search(
    sources: Sequence[str | Path | Mapping[str, Any]],
    overrides: Iterable[str] | Mapping[str, Any],
    space: str | Path | Mapping[str, Any] | None,
    settings: dict[str, Any],
    *,
    search_dir: str | Path | None = None,
    resume: str | Path | None = None,
) -> tuple[Setup, Path]:
    """The search that is asked for, checked, and where it goes. Writes nothing."""
    if resume is not None:
        if sources or overrides or space is not None:
            raise UserError(
                "--resume: goes on with the recipe and the space of that search; leave out recipe, space, KEY=VALUE, "
                "--workers and --gpu"
            )
        if search_dir is not None:
            raise UserError("--search-dir: the search goes on in its own folder; leave this out with --resume")
        folder = find_search(str(resume))
        return read_setup(folder, settings), folder
    if space is None:
        raise UserError("SPACE: is missing; give a file with lines like optim.lr: loguniform(1e-5, 1e-2)")
    if search_dir is not None and (not str(search_dir) or "://" in str(search_dir)):
        raise UserError(
            f"--search-dir: {str(search_dir)!r} is no folder; trials upload to a store by checkpoint.upload_to"
        )
    setup = set_up(sources, overrides, space, settings)
    folder = expand_home(search_dir) if search_dir is not None else new_run_dir(setup.base.recipe.name, ROOT)
    check_is_new(folder, "--search-dir")
    return setup, folder


def read_setup(path: Path, settings: dict[str, Any]) -> Setup:
    """The search in a folder, with what a resume may change."""
    tree, _ = read_yaml(path / SEARCH)
    known = tree.get(SETTINGS, {})
    for name, value in settings.items():
        same = (value, [value]) if name == "metric" else (value,)  # one may be given without a list
        if name not in _FREE and known.get(name) not in same:
            raise UserError(f"tune.{name}: cannot change when a search is resumed; start a new one for that")
        if name == "trials" and known.get("scheduler") in POPULATIONS and known.get(name) != value:
            raise UserError("tune.trials: a population cannot grow on the way; start a new search for that")
    base, space = check_tree(tree["recipe"]), parse_space(tree["space"])
    return make_setup(base, space, known | settings)


def is_search(path: Path) -> bool:
    """Whether a folder holds one."""
    return (path / SEARCH).is_file() or (path / JOURNAL).is_file()
