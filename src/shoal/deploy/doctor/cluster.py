"""Every check of a cluster, one after the other."""

import contextlib
import secrets
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from shoal.core.errors import UserError
from shoal.core.secrets import scrub
from shoal.deploy.doctor import members, pairs, reduce, shared, skew
from shoal.deploy.doctor.devices import LOOK_WITHIN_S
from shoal.deploy.doctor.finding import Finding, passed, skipped
from shoal.deploy.doctor.gcs import check_gcs
from shoal.deploy.doctor.network import is_own
from shoal.deploy.doctor.pairs import Link, Pair
from shoal.deploy.doctor.probe import versions
from shoal.deploy.doctor.transfer import CONNECT_WITHIN_S, LONGEST_S, STALLED_S
from shoal.launch.on_ray import connected
from shoal.launch.run import Launch
from shoal.observe.console import SilentConsole

if TYPE_CHECKING:
    from shoal.deploy.doctor.visit import Place, Visit

Tell = Callable[[str], None]
_ANSWER_WITHIN_S = 15.0
_LOOK_EVERY_S = 0.25
_GRACE_S = 3.0
"""After one rank has failed, for the others to say what they know."""
_AGAIN = 16
"""So many slow links are measured a second time: another program may have been in the way."""


def check_cluster(address: str, storage: str | None, tell: Tell) -> Generator[Finding, None, None]:
    """What there is to say of the cluster at that address, as it becomes known; nothing is left there.

    Args:
        address: As `shoal train` takes it.
        storage: A folder that all machines should share.
        tell: Told what is being done.
    """
    tell(f"connecting to {scrub(address)}")
    if (trouble := check_gcs(address)) is not None:
        yield _of_cluster(trouble)
        return
    with contextlib.ExitStack() as stack:
        try:
            ray, _ = stack.enter_context(connected(1, Launch(SilentConsole(), address=address)))
        except UserError as error:
            yield _of_cluster(_judge_connection(str(error)))
            return
        yield _of_cluster(passed("connect", f"{scrub(address)}, Ray {ray.__version__}"))
        from shoal.deploy.doctor.visit import Visit  # not before: importing Ray fixes its settings
        from shoal.deploy.doctor.visit import members as known_members

        known = known_members()
        yield _of_cluster(members.judge_members(list(known.values())))
        tell("starting a process on each machine")
        visit = Visit(known)
        stack.callback(visit.close)
        asked = [place.name for place in visit.places]
        yield _of_cluster(members.judge_answers(asked, visit.begin()))
        if visit.places:
            yield from _check_places(visit, storage, tell)


def _judge_connection(words: str) -> Finding:
    """Why there is no connection: `words` is what `shoal train` would say."""
    found, _, advice = words.removeprefix("--address: ").partition("; ")
    advice = advice.removesuffix(", or leave this out") or "ray status, on the head, tells what it knows"
    if "ray://" in found:  # a Ray client is told nothing of tokens
        advice += "; it needs ray[client] on both sides, and the head's token here"
    return Finding("connect", "fail", found, advice)


def _check_places(visit: "Visit", storage: str | None, tell: Tell) -> Iterator[Finding]:
    from shoal.deploy.doctor.visit import busy

    tell("looking at each machine")
    seen = yield from _check_machines(visit)
    yield _of_cluster(skew.judge_skew(_offsets(visit, tell)))
    used = busy()
    links = _measure_links(visit, tell)
    for finding in pairs.judge_links(links, used):
        yield _of_cluster(finding)
    workers = [place for place in visit.places if place.member.is_worker]
    tell("all-reduce between the machines")
    ranks = [(place, 0) for place in workers]
    yield _of_cluster(_all_reduce(visit, "all-reduce", "gloo", ranks, used))
    gpus = [(place, gpu) for place in workers for gpu in range(_usable_gpus(place, seen.get(place.name, 0)))]
    if gpus:
        tell("all-reduce between the GPUs")
        yield _of_cluster(_all_reduce(visit, "all-reduce of GPUs", "nccl", gpus, used))
    if storage is None:
        yield _of_cluster(skipped("storage", "say which folder all machines share: --storage DIR"))
    else:
        tell("writing to storage from each machine")
        for finding in _check_storage(visit, storage):
            yield _of_cluster(finding)


def _usable_gpus(place: "Place", seen: int) -> int:
    """Those that workers there may be given."""
    return min(seen, int(place.member.resources.get("GPU", 0)))


def _of_cluster(finding: Finding) -> Finding:
    return replace(finding, group="cluster")


def _check_machines(visit: "Visit") -> Generator[Finding, None, dict[str, int]]:
    """The checks of each machine, and those that compare them; returns the GPUs that each sees."""
    answers = visit.ask("look", timeout_s=LOOK_WITHIN_S + _ANSWER_WITHIN_S)
    for name, told in answers.values.items():
        for record in told["findings"]:
            yield replace(Finding(**record), group="nodes", node=name)
    for name, why in answers.errors.items():
        advice = "look there at free memory and at /tmp/ray/session_latest/logs"
        yield Finding("machine", "fail", why, advice, group="nodes", node=name)
    by_node = {name: told["versions"] for name, told in answers.values.items()}
    if not any(is_own(place.member.address) for place in visit.places):
        by_node["this machine"] = versions("")  # without what needs a GPU: this machine may need none
    yield _of_cluster(members.judge_versions(by_node))
    told_ray = {place.name: place.member.resources.get("GPU", 0.0) for place in visit.places}
    seen = {name: told["gpus"] for name, told in answers.values.items()}
    yield _of_cluster(members.judge_gpus(told_ray, seen))
    return seen


def _offsets(visit: "Visit", tell: Tell) -> dict[str, skew.Offset]:
    from ray.exceptions import RayError

    found = {}
    for place in visit.places:
        tell("comparing clocks")
        with contextlib.suppress(RayError):  # one that has gone meanwhile is told of by the checks that need it
            trips = skew.ask_clock(lambda place=place: visit.ask_one(place, "now", _ANSWER_WITHIN_S))  # type: ignore[misc]
            found[place.name] = skew.offset_of(trips)
    return found


def _measure_links(visit: "Visit", tell: Tell) -> dict[Pair, Link]:
    """From every machine to every other, or to some of them, each way."""
    places = {place.name: place for place in visit.places}
    answers = visit.ask("listen", timeout_s=_ANSWER_WITHIN_S)
    ports = answers.values
    rounds = pairs.in_rounds(pairs.choose_pairs(list(ports)))
    links: dict[Pair, Link] = {("nobody", name): Link(error=why) for name, why in answers.errors.items()}
    try:
        for number, pairs_of_round in enumerate(rounds, 1):
            for directed in (pairs_of_round, [(other, one) for one, other in pairs_of_round]):
                tell(f"measuring the network, {number} of {len(rounds)}")
                links |= _measure(visit, places, ports, directed)
        for directed in pairs.in_rounds(pairs.slow_links(links)[:_AGAIN]):
            tell("measuring slow links again")
            again = _measure(visit, places, ports, directed)
            links |= {pair: links[pair].better(link) for pair, link in again.items()}
    finally:
        visit.ask("stop_listening", timeout_s=_ANSWER_WITHIN_S)
    return links


def _measure(visit: "Visit", places: dict[str, "Place"], ports: Any, directed: list[Pair]) -> dict[Pair, Link]:
    to = dict(directed)
    limit_s = CONNECT_WITHIN_S + 2 * STALLED_S + LONGEST_S + _ANSWER_WITHIN_S
    answers = visit.ask(
        "measure",
        of=[places[one] for one in to],
        each=lambda place: (places[to[place.name]].member.address, *ports[to[place.name]]),
        timeout_s=limit_s,
    )
    found = {(one, to[one]): pairs.link_from(facts) for one, facts in answers.values.items()}
    return found | {(one, to[one]): Link(error=why) for one, why in answers.errors.items()}


def _all_reduce(visit: "Visit", check: str, backend: str, wanted: list[tuple["Place", int]], used: str) -> Finding:
    """A rank for each of these: a machine, and the number of its GPU."""
    if len(wanted) < 2:
        return reduce.judge_reduce(check, [], reduce.LIMIT_S)
    first = wanted[0][0]
    opened = visit.ask("open_meeting", timeout_s=_ANSWER_WITHIN_S, of=[first])
    if opened.errors:
        return Finding(
            check, "fail", f"{first.name}: {opened.errors[first.name]}", "see the other checks of that machine"
        )
    jobs: dict[str, list[dict[str, Any]]] = {}
    for rank, (place, gpu) in enumerate(wanted):
        job = {"rank": rank, "world_size": len(wanted), "backend": backend, "gpu": gpu}
        job |= {"host": first.member.address, "port": opened.values[first.name], "timeout_s": reduce.JOIN_WITHIN_S}
        jobs.setdefault(place.name, []).append(job)
    of = [place for place in visit.places if place.name in jobs]
    try:
        started = visit.ask("start_ranks", of=of, each=lambda place: (jobs[place.name],), timeout_s=_ANSWER_WITHIN_S)
        nodes = {job["rank"]: name for name, own in jobs.items() for job in own}
        ranks = {n: reduce.Rank(name, n, error=started.errors.get(name, "")) for n, name in nodes.items()}
        _follow(visit, of, ranks)
    finally:
        visit.ask("end_ranks", of=of, timeout_s=_ANSWER_WITHIN_S)
    return reduce.judge_reduce(check, list(ranks.values()), reduce.LIMIT_S, used)


def _follow(visit: "Visit", of: list["Place"], ranks: dict[int, reduce.Rank]) -> None:
    """Until all are done, one has failed or the time is over: how far the ranks have come."""
    until = time.monotonic() + reduce.LIMIT_S
    while time.monotonic() < until and not all(rank.stage == "done" or rank.error for rank in ranks.values()):
        if any(rank.error for rank in ranks.values()):
            until = min(until, time.monotonic() + _GRACE_S)
        time.sleep(_LOOK_EVERY_S)
        answers = visit.ask("ranks", of=of, timeout_s=_ANSWER_WITHIN_S)
        for states in answers.values.values():
            for number, state in states.items():
                ranks[number] = replace(
                    ranks[number],
                    stage=state["stage"],
                    error=state.get("error", ""),
                    seconds=state.get("s", 0.0),
                    num_bytes=state.get("bytes", 0),
                )
        for number, rank in ranks.items():
            if rank.node in answers.errors:
                ranks[number] = replace(rank, error=answers.errors[rank.node])


def _check_storage(visit: "Visit", folder: str) -> list[Finding]:
    key = secrets.token_hex(6)
    numbers = {place.name: number for number, place in enumerate(visit.places)}
    by_number = {str(number): name for name, number in numbers.items()}
    limit_s = shared.SEEN_WITHIN_S + 2 * _ANSWER_WITHIN_S
    try:
        written = visit.ask("write", each=lambda place: (folder, key, numbers[place.name]), timeout_s=limit_s)
        errors = dict(written.errors) | {n: told["error"] for n, told in written.values.items() if "error" in told}
        if errors:
            return shared.judge_storage(shared.Storage(folder, errors=errors))
        hashes = {numbers[name]: told["sha256"] for name, told in written.values.items()}
        others = {name: {n: sha for n, sha in hashes.items() if n != own} for name, own in numbers.items()}
        seen = visit.ask("read", each=lambda place: (folder, key, others[place.name]), timeout_s=limit_s)
        if seen.errors:
            return shared.judge_storage(shared.Storage(folder, errors=seen.errors))
        unseen = {
            name: {by_number[number]: why for number, why in told["wrong"].items()}
            for name, told in seen.values.items()
            if told["wrong"]
        }
        locks = []
        if not unseen and len(visit.places) > 1:
            held = visit.ask("lock", folder, key, of=visit.places[:1], timeout_s=_ANSWER_WITHIN_S)
            rest = visit.ask("lock", folder, key, of=visit.places[1:], timeout_s=_ANSWER_WITHIN_S)
            locks = list(rest.values.values()) if set(held.values.values()) == {"taken"} else list(held.values.values())
        return shared.judge_storage(
            shared.Storage(
                folder,
                unseen=unseen,
                seen_s=max(told["s"] for told in seen.values.values()),
                write_s=max(told["s"] for told in written.values.values()),
                free_bytes=min(told["free_bytes"] for told in written.values.values()),
                locks=locks,
                machines=len(numbers),
            )
        )
    finally:
        visit.ask("remove", each=lambda place: (folder, key, numbers[place.name]), timeout_s=limit_s)
