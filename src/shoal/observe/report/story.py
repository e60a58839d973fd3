"""What happened in a run: starts, failures, restarts, saves and ends, in words and on a time axis."""

from typing import Any

from shoal.core.secrets import scrub
from shoal.observe.event_words import event_words
from shoal.observe.report.folder import Folder, number, numbers
from shoal.observe.report.thin import spread

_TONES = {
    "failure": "bad",
    "hang": "bad",
    "failed": "bad",
    "save_failed": "bad",
    "upload_failed": "bad",
    "checkpoint_rejected": "bad",
    "warning": "warn",
    "recompiled": "warn",
    "recompile_limit": "warn",
    "data_skipped": "warn",
    "forgotten": "warn",
    "preemption": "warn",
    "interrupted": "warn",
    "early_stop": "warn",
    "restart": "start",
    "resize": "start",
    "start": "start",
    "resume": "start",
    "first_step": "start",
    "save": "save",
    "upload": "save",
    "done": "good",
}
_LEFT_OUT = ("workers",)
"""Events that are shown elsewhere."""
_STOPPING = ("failure", "hang", "restart", "resize")
_ENDS = ("done", "failed", "interrupted")
_MOST_EVENTS, _MOST_SAVES = 400, 200
_LONGEST_WORDS, _LONGEST_DETAIL = 600, 6000


def story_of(folder: Folder) -> dict[str, Any]:
    """Events in words, and what the run was doing when."""
    told = [event for event in folder.events if event["event"] not in _LEFT_OUT]
    saves = [event for event in told if event["event"] in ("save", "upload")]
    others = [event for event in told if event["event"] not in ("save", "upload")]
    # The first ones tell how it came about, the last ones how it ended.
    if len(others) > _MOST_EVENTS:
        others = others[: _MOST_EVENTS // 2] + others[-_MOST_EVENTS // 2 :]
    shown = others + [saves[place] for place in spread(len(saves), _MOST_SAVES)]
    return {
        "events": [_told(event, folder.began) for event in sorted(shown, key=lambda event: event["time"])],
        "left_out": len(told) - len(shown),
        "stretches": stretches_of(folder),
    }


def _told(event: dict[str, Any], began: float) -> dict[str, Any]:
    name = event["event"]
    details = [event.get("traceback"), *(_stacks(event.get("stacks")))]
    # Without secrets before it is cut: half of one would not be known as such.
    detail = scrub("\n".join(text for text in details if isinstance(text, str)))
    return {
        "time": round(event["time"] - began, 1),
        "kind": name,
        "tone": _TONES.get(name, "plain"),
        "words": scrub(event_words(event))[:_LONGEST_WORDS],
        "step": event.get("step") if isinstance(event.get("step"), int) else None,
        **({"detail": detail[-_LONGEST_DETAIL:]} if detail else {}),
    }


def _stacks(stacks: Any) -> list[str]:
    return [f"[rank {rank}]\n{text}" for rank, text in stacks.items()] if isinstance(stacks, dict) else []


def stretches_of(folder: Folder) -> list[dict[str, Any]]:
    """What the run was doing, from when to when, in seconds since it was asked for: starting, training, restarting.

    Between an end and the next `shoal train --resume` there is nothing.
    """
    found: list[dict[str, Any]] = []
    doing, since = "", folder.began

    def turn(to: str, at: float) -> None:
        nonlocal doing, since
        if doing and at > since:
            found.append({"doing": doing, "from": round(since - folder.began, 2), "to": round(at - folder.began, 2)})
        doing, since = to, at

    asked_before = None
    for event in folder.events:
        name, when = event["event"], event["time"]
        if name == "start":
            asked = number(event.get("asked"))
            if (not found and not doing) or (asked is not None and asked != asked_before):
                if doing:  # killed with its launcher: nobody told of an end
                    turn("", last_sign(folder, before=when if asked is None else min(asked, when)))
                doing, since = "starting", min(when, max(asked or when, since))
            asked_before = asked
        elif name == "first_step":
            turn("training", when)
        elif name in _STOPPING and doing == "training":
            turn("restarting", when)
        elif name in _ENDS:
            turn("", when)
    turn("", last_sign(folder))
    return found


def last_sign(folder: Folder, before: float = float("inf")) -> float:
    """When the run was last heard of, in unix seconds."""
    records = [*folder.events[-1:], *folder.reports[-1:], *folder.workers[-1:]]
    if before < float("inf"):
        records = [*folder.events, *folder.reports]
    times = [time for record in records if (time := number(record.get("time"))) is not None and time < before]
    return max(times, default=folder.began)


def wall_s(stretches: list[dict[str, Any]]) -> float:
    """How long the run has had workers, or waited for them."""
    return float(sum(stretch["to"] - stretch["from"] for stretch in stretches))


def why_it_failed(folder: Folder) -> str | None:
    """The message of a failed run's end."""
    if folder.run.status != "failed":
        return None
    events = [event for event in folder.events if event["event"] in ("failed", "failure")]
    messages = [event["message"] for event in reversed(events) if isinstance(event.get("message"), str)]
    return scrub(messages[0])[:_LONGEST_WORDS] if messages else None


def lost_steps(folder: Folder) -> int:
    """Steps that were made twice, or for nothing."""
    facts = [numbers(event) for event in folder.events if event["event"] == "forgotten"]
    return int(sum(max(fact.get("to_step", 0) - fact.get("after_step", 0), 0) for fact in facts))
