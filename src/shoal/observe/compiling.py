"""What torch.compile did, in the words of who has to do something about it. Pure functions of what PyTorch tells."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from shoal.observe.number_words import counted, short_time

_LONGEST = 120
_LIMIT = re.compile(r"(recompile|cache)[ _](size[ _])?limit exceeded", re.IGNORECASE)


@dataclass(frozen=True)
class Compilation:
    """One thing that was compiled: a function's forward pass, or its backward pass."""

    key: str = ""
    """What a forward pass has in common with what is compiled for going backward through it."""
    function: str = ""
    file: str = ""
    line: int = 0
    is_forward: bool = True
    num_operations: int = 0
    began: float = 0.0
    """In unix seconds."""
    ended: float = 0.0
    hits: int = 0
    """Pieces of compiled code that the cache had."""
    misses: int = 0
    guard: str = ""
    """Why it is not the first of its function, as PyTorch puts it; empty: it is the first."""
    failure: str = ""

    @property
    def is_limit(self) -> bool:
        """Whether this is where PyTorch gives up, and lets the function run as it is from now on."""
        return is_limit_reached(self.failure)

    @property
    def is_graph(self) -> bool:
        """Whether something came of it that computes."""
        return self.is_forward and not self.failure and self.num_operations > 0

    @property
    def where(self) -> str:
        """`forward (model.py:31)`; of a wrapper of PyTorch's own: `the model`."""
        parts = PurePath(self.file).parts
        if not self.function or "torch" in parts[:-1]:
            return "the model"
        function = re.sub(r"^torch_dynamo_resume_in_(.+)_at_\d+$", r"the rest of \1", self.function)
        return f"{function} ({parts[-1] if parts else '?'}:{self.line})"


def is_limit_reached(failure: str) -> bool:
    """Whether PyTorch says so of a function that it has compiled too often."""
    return bool(_LIMIT.search(failure.partition("\n")[0]))


@dataclass(frozen=True)
class Reason:
    """Why something was compiled once more, and what to do."""

    words: str
    advice: str


_SHAPE = (
    "give every batch the same shape (pad to one length, drop what is left over), or mark the dimension that changes "
    "with torch._dynamo.mark_dynamic"
)
_VALUE = "put what changes from step to step into a tensor, or keep it fixed"
_STATE = "switch it in one place, outside of what is compiled"
_ALIKE = "give the compiled function tensors of one kind"


def reason_of(guard: str) -> Reason:
    """Of a guard that failed, as PyTorch tells it: `0/1: tensor 'x' size mismatch at index 0. expected 8, actual 5`."""
    text = re.sub(r"^\d+/\d+:\s*", "", guard.strip().partition("\n")[0])
    text = re.sub(r"\s+#.*$", "", text).strip().replace(";", ",")
    for pattern, words, advice in _KNOWN:
        if (found := pattern.search(text)) is not None:
            return Reason(_shortened(found.expand(words)), advice)
    return Reason(_shortened(text or "PyTorch does not say why"), _VALUE if text else "")


_KNOWN = tuple(
    (re.compile(pattern), words, advice)
    for pattern, words, advice in (
        (
            r"tensor '(.+?)' size mismatch at index (\d+)\. expected (\d+), actual (\d+)",
            r"a batch of another shape: dimension \2 of \1 was \3, then \4",
            _SHAPE,
        ),
        (r"tensor '(.+?)' rank mismatch\. expected (\d+), actual (\d+)", r"\1 had \2 dimensions, then \3", _SHAPE),
        (r"tensor '(.+?)' stride mismatch.*", r"\1 lies in memory in another order", _ALIKE),
        (r"tensor '(.+?)' dtype mismatch\. expected (\w+), actual (\w+)", r"\1 was \2, then \3", _ALIKE),
        (r"tensor '(.+?)' requires_grad mismatch.*", r"\1 needs a gradient in some steps and not in others", _ALIKE),
        (r"GLOBAL_STATE changed:.*grad_mode.*", r"gradients were turned on or off", _STATE),
        (r"GLOBAL_STATE changed:\s*(.*?)\s*$", r"a setting of PyTorch changed: \1", _STATE),
        (r"^.*\.training\b.*", r"a module was switched between training and evaluation", _STATE),
        (r"^.*\.size\(\)\[(\d+)\].*", r"a batch of another shape: \g<0>", _SHAPE),
    )
)


def _shortened(words: str) -> str:
    return words if len(words) <= _LONGEST else words[: _LONGEST - 3].rstrip() + "..."


def seconds_of(found: Iterable[Compilation]) -> float:
    """Of wall time: what goes on at once counts once."""
    total, until = 0.0, 0.0
    for one in sorted(found, key=lambda one: one.began):
        total += max(0.0, one.ended - max(one.began, until))
        until = max(until, one.ended)
    return total


def compiled_words(found: Sequence[Compilation], for_what: str, breaks: Sequence[str]) -> str:
    """`compiled for training in 12.3 s: 1 graph, none of 2 pieces of code from the cache`."""
    hits, pieces = sum(one.hits for one in found), sum(one.hits + one.misses for one in found)
    graphs = counted(sum(one.is_graph for one in found), "graph")
    words = f"compiled for {for_what} in {short_time(seconds_of(found))}: {graphs}"
    if pieces:
        share = "all" if hits == pieces else str(hits) if hits else "none"
        words += f", {share} of {counted(pieces, 'piece')} of code from the cache"
    if breaks:
        words += f", {counted(len(breaks), 'graph break')} ({_shortened(breaks[0])})"
    return words


@dataclass(frozen=True)
class Recompiled:
    """What was compiled once more after the first round, over some time."""

    count: int = 0
    seconds: float = 0.0
    reason: Reason | None = None
    """Of the newest; None where it is another worker's."""
    rank: int | None = None
    """That other worker."""
    given_up: str = ""
    """The function that PyTorch lets run uncompiled from now on."""

    def __bool__(self) -> bool:
        return self.count > 0 or bool(self.given_up)

    def and_then(self, later: "Recompiled") -> "Recompiled":
        """Both together."""
        return Recompiled(
            self.count + later.count,
            self.seconds + later.seconds,
            later.reason or self.reason,
            self.rank if later.rank is None else later.rank,
            later.given_up or self.given_up,
        )

    @property
    def words(self) -> str:
        """`3 recompilations took 4.2 s (a batch of another shape: ...)`."""
        told = []
        if self.count:
            who = "" if self.rank is None else f" of worker {self.rank}"
            why = "" if self.reason is None else f" ({self.reason.words})"
            told.append(f"{counted(self.count, 'recompilation')}{who} took {short_time(self.seconds)}{why}")
        if self.given_up:
            told.append(
                f"PyTorch has given up compiling {self.given_up} anew: what fits no version of it runs uncompiled"
            )
        return ", and ".join(told)

    @property
    def advice(self) -> str:
        """What to do about it."""
        known = self.reason.advice if self.reason is not None else ""
        return f"{known or 'TORCH_LOGS=recompiles in the environment says why'}; or train.compile=false"
