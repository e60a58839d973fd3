"""Seeing torch.compile at work: what it compiles, for how long, what of it the cache had, and what it does again.

Whether anything is compiled is asked of PyTorch's compiler, not of the recipe: a task may compile something of its own.
As long as the compiler is not loaded, a step costs one look into a dictionary; after that, one at the end of its list.
"""

import contextlib
import dataclasses
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from shoal.core.compile_cache import VARIABLE, fallback_problem
from shoal.observe.compiling import Compilation, Recompiled, compiled_words, is_limit_reached, reason_of, seconds_of
from shoal.observe.records import Observer, Report
from shoal.train.training import Training

_TRAINING, _EVALUATION = "training", "evaluation"
_MOST_TOLD = 5
"""Events of one kind; what comes after is in the verdict alone."""
_MOST_BREAKS = 5
_LONGEST_GUARD = 300


@contextlib.contextmanager
def compiling_seen(run: Training, rank: int) -> Iterator[None]:
    """While the run trains, tell its observer what is compiled, its clock for how long, and its verdict what again."""
    watch = CompileWatch(run, rank)
    own, run.observer = run.observer, watch
    try:
        yield
        watch.look(_EVALUATION)  # one that was cut short
    finally:
        watch.detach()
        run.observer = own


class CompileWatch:
    """An observer around another one: after every step and every evaluation it looks what was compiled for it."""

    def __init__(self, run: Training, rank: int) -> None:
        self._observer: Observer = run.observer
        self._clock, self._vitals, self._state, self._rank = run.clock, run.vitals, run.state, rank
        self._owner = threading.get_ident()
        self._dynamo: Any = None
        """PyTorch's compiler, once it is loaded."""
        self._last: Any = None
        """The newest record that was read."""
        self._found: list[Compilation] = []
        """What was read and not told yet."""
        self._named: dict[str, Compilation] = {}
        """The first of every function, by PyTorch's number for it."""
        self._num_breaks: dict[str, int] = {}
        self._rounds: set[str] = set()
        """What was gone through once: what is compiled for the first time is no surprise."""
        self._told: dict[str, int] = {}
        self._is_compiling = False
        self._attach(is_before=True)

    def report(self, report: Report) -> None:
        """What an evaluation has compiled since the last step is its own."""
        if any(name.startswith("val_") for name in report.metrics):
            self.look(_EVALUATION)
        self._observer.report(report)

    def event(self, name: str, fields: dict[str, Any]) -> None:
        """As it is."""
        self._observer.event(name, fields)

    def tick(self, step: int) -> None:
        """What was compiled since the last look was for this step."""
        self._observer.tick(step)
        self.look(_TRAINING)

    def _attach(self, is_before: bool = False) -> None:
        """Be told from now on; what was compiled before the run began, for another one in this process, is not of
        interest."""
        utils = sys.modules.get("torch._dynamo.utils")
        callbacks = sys.modules.get("torch._dynamo.callback")
        if utils is None or callbacks is None:
            return
        self._dynamo = utils
        if is_before:
            self._last = next(reversed(utils.get_compilation_metrics()), None)
            self._num_breaks = dict(utils.counters["graph_break"])
        callbacks.callback_handler.register_start_callback(self._begins)
        callbacks.callback_handler.register_end_callback(self._ends)

    def detach(self) -> None:
        """Be told no more."""
        if self._dynamo is not None:
            handler = sys.modules["torch._dynamo.callback"].callback_handler
            for kept, own in ((handler.start_callbacks, self._begins), (handler.end_callbacks, self._ends)):
                if own in kept:  # torch._dynamo.reset() forgets them
                    kept.remove(own)

    def _begins(self, _: Any) -> None:
        """PyTorch starts to compile: in the thread that trains, in one that goes backward for it, or in any other."""
        thread = threading.current_thread()
        if threading.get_ident() != self._owner and not isinstance(thread, threading._DummyThread):
            return
        self._read()  # its list is short
        self._is_compiling = True
        self._clock.begin_compile()
        self._tell("compiling", {"cache": os.environ.get(VARIABLE)}, most=1)

    def _ends(self, _: Any) -> None:
        if self._is_compiling:
            self._is_compiling = False
            self._clock.end_compile()

    def _read(self) -> None:
        """Take in what PyTorch has recorded since the last time."""
        records = self._dynamo.get_compilation_metrics()
        if not records or records[-1] is self._last:
            return
        fresh = []
        for record in reversed(records):
            if record is self._last:
                break
            fresh.append(record)
        self._last = records[-1]
        for record in reversed(fresh):
            if getattr(record, "is_runtime", None) is True:
                continue  # of CUDA graphs and tuning while a graph runs: they span more than the work itself
            one = _as_compilation(record)
            named = self._named.setdefault(one.key.partition("/")[0], one)  # giving up has no name of its own
            self._found.append(dataclasses.replace(one, function=named.function, file=named.file, line=named.line))

    def look(self, for_what: str) -> None:
        """Tell what was compiled since the last look, which was for this."""
        if self._dynamo is None:
            self._attach()
        if self._dynamo is not None:
            self._read()
        is_first = for_what not in self._rounds
        self._rounds.add(for_what)
        if not self._found:
            return
        found, self._found = _together(self._found), []
        again = [] if is_first else [group for group in found if any(one.guard and one.is_graph for one in group)]
        others = [one for group in found if group not in again for one in group]
        if any(one.is_graph for one in others):
            self._tell_compiled(others, for_what)
        if again:
            self._tell_again(again)
        for one in others:
            if one.is_limit:
                self._tell_given_up(one)

    def _tell_compiled(self, found: Sequence[Compilation], for_what: str) -> None:
        breaks, folder = self._new_breaks(), os.environ.get(VARIABLE)
        hits, misses = sum(one.hits for one in found), sum(one.misses for one in found)
        facts = {
            "for": for_what,
            "step": self._state.step,
            "seconds": round(seconds_of(found), 3),
            "graphs": sum(one.is_graph for one in found),
            "hits": hits,
            "misses": misses,
            "from_cache": hits > 0 and misses == 0,
            "cache": folder,
            "graph_breaks": len(breaks),
            "breaks": breaks[:_MOST_BREAKS],
        }
        self._tell("compiled", {"words": compiled_words(found, for_what, breaks), **facts})
        if problem := fallback_problem():
            words = f"compiled code is kept in {folder}, which a reboot may empty, because {problem}"
            self._tell("warning", {"message": f"{words}; set {VARIABLE} to a folder that stays"}, most=1)

    def _tell_again(self, groups: Sequence[Sequence[Compilation]]) -> None:
        newest = next(one for one in groups[-1] if one.guard)
        seconds = seconds_of(one for group in groups for one in group)
        reason = reason_of(newest.guard)
        found = Recompiled(len(groups), seconds, reason)
        self._vitals.note_recompiled(found)
        facts = {"step": self._state.step, "count": len(groups), "seconds": round(seconds, 3), "reason": reason.words}
        facts |= {"function": newest.where, "guard": newest.guard.partition("\n")[0][:_LONGEST_GUARD]}
        self._tell("recompiled", {"words": f"{found.words}, in {newest.where}", **facts})

    def _tell_given_up(self, one: Compilation) -> None:
        reason = reason_of(one.guard)
        found = Recompiled(reason=reason, given_up=one.where)
        self._vitals.note_recompiled(found)
        facts = {"step": self._state.step, "function": one.where, "reason": reason.words}
        self._tell("recompile_limit", {"words": f"{found.words} ({reason.words})", **facts})

    def _new_breaks(self) -> list[str]:
        """Why graphs were broken since the last time, the first line of each."""
        now = dict(self._dynamo.counters["graph_break"])
        new = [reason for reason, count in now.items() if count > self._num_breaks.get(reason, 0)]
        self._num_breaks = now
        return [reason.partition("\n")[0] for reason in new if not is_limit_reached(reason)]

    def _tell(self, name: str, fields: dict[str, Any], most: int = _MOST_TOLD) -> None:
        """To those who watch, who are with the first worker: the others compile what it compiles."""
        told = self._told[name] = self._told.get(name, 0) + 1
        if told == most > 1:
            fields |= {"words": f"{fields['words']} (what follows is in the verdict)"}
        if self._rank == 0 and told <= most:
            self._observer.event(name, fields)


def _together(found: Sequence[Compilation]) -> list[list[Compilation]]:
    """Forward passes, each with what was compiled for going backward through it."""
    groups: dict[str, list[Compilation]] = {}
    for one in found:
        groups.setdefault(one.key, []).append(one)
    return list(groups.values())


def _as_compilation(record: Any) -> Compilation:
    """What we want to know of one of PyTorch's records, whichever version wrote it."""

    def of(name: str) -> Any:
        return getattr(record, name, None)

    return Compilation(
        key=str(of("compile_id")),
        function=of("co_name") or "",
        file=of("co_filename") or "",
        line=of("co_firstlineno") or 0,
        is_forward=of("is_forward") is not False,
        num_operations=of("graph_op_count") or 0,
        began=(of("start_time_us") or 0) / 1e6,
        ended=(of("end_time_us") or 0) / 1e6,
        hits=of("inductor_fx_local_cache_hit_count") or 0,
        misses=of("inductor_fx_local_cache_miss_count") or 0,
        guard=of("recompile_reason") or "",
        failure=of("fail_reason") or "",
    )
