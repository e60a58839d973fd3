"""Being one of the workers that torchrun has started: `torchrun ... -m shoal.cli.main train ...`."""

import dataclasses
import datetime
import hashlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.errors import RunError, UserError
from shoal.core.machine import usable_cores
from shoal.launch.environment import nccl_environment, network_environment
from shoal.launch.run import Launch, Prepared, check_is_new
from shoal.observe.run_folder import append_event, event_record
from shoal.observe.runs import read_events
from shoal.recipe.load import check_tree
from shoal.recipe.merge import merge, overlay_of, override_paths
from shoal.recipe.schema import Recipe

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from shoal.core.group import Group, Meeting

_RUN = "shoal/run"
"""Where torchrun's store keeps which run the workers are in, so that they know after a restart."""
_START = "shoal/start"
_CAUSE_S = 1.0
"""How long a worker that lost another keeps still, so that the other's own message comes first."""


@dataclasses.dataclass(frozen=True)
class Place:
    """Where torchrun has put this process."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: str
    num_nodes: int
    host: str
    port: int
    restarts: int
    has_store: bool
    """Whether torchrun's agent listens at `host` and `port`; its store outlives the workers."""


def my_place() -> Place:
    """As torchrun tells it, by environment variables."""
    told = os.environ
    return Place(
        rank=int(told["RANK"]),
        world_size=int(told["WORLD_SIZE"]),
        local_rank=int(told["LOCAL_RANK"]),
        local_world_size=int(told["LOCAL_WORLD_SIZE"]),
        node=told["GROUP_RANK"],
        num_nodes=int(told["GROUP_WORLD_SIZE"]),
        host=told["MASTER_ADDR"],
        port=int(told["MASTER_PORT"]),
        restarts=int(told["TORCHELASTIC_RESTART_COUNT"]),
        has_store=told["TORCHELASTIC_USE_AGENT_STORE"] == "True",
    )


def as_many_as_started(prepared: Prepared, overrides: Iterable[str] | Mapping[str, Any]) -> Prepared:
    """The recipe with as many workers as torchrun has started; one who asks for another number is told."""
    world_size = my_place().world_size
    asked = overlay_of(override_paths(overrides)).get("cluster") or {}
    most = asked.get("workers") or world_size
    if not (asked.get("min_workers") or most) <= world_size <= most:
        raise UserError(
            f"cluster.workers: {most} is asked for and torchrun has started {world_size} processes; "
            "leave out --workers, or give torchrun another --nproc-per-node or --nnodes"
        )
    cluster = {"workers": world_size, "min_workers": None}
    return dataclasses.replace(prepared, loaded=check_tree(merge(prepared.loaded.tree(), {"cluster": cluster})))


def run_under_torchrun(prepared: Prepared, how: Launch) -> dict[str, Any]:
    """Train as the worker that this process is; a summary on rank 0, and how it ended elsewhere."""
    from shoal.core.group import by_network, joined
    from shoal.core.process import Process, choose_device
    from shoal.train.request import RunRequest
    from shoal.train.worker import train_worker

    how.enter("building")
    place, recipe = my_place(), prepared.loaded.recipe
    os.environ.update(_network(place, recipe))
    device = choose_device(recipe.cluster.gpus_per_worker, place.local_rank)
    run_dir = prepared.run_dir
    has_stepped = False

    def on_first_step() -> None:
        nonlocal has_stepped
        has_stepped = True
        how.enter("training")

    try:
        # Nobody watches here: a worker that hangs is noticed by those who wait for it.
        store, meeting = _meet(place, recipe.nccl.timeout_s or recipe.failures.hang_timeout_s, how.stop)
        with joined(meeting, device, recipe.parallel.backend) as group:
            run = _agree_on_run(prepared, how, place, store, group)
            run_dir = Path(run.pop("run_dir"))
            request = RunRequest(
                loaded=prepared.loaded,
                run_dir=run_dir,
                console=how.console,
                stop=how.stop,
                on_first_step=on_first_step,
                threads=_threads(recipe, place),
                marks=how.marks,
                launch=how.asked,
                **run,
            )
            process = Process(
                rank=place.rank,
                world_size=place.world_size,
                device=device,
                group=group,
                local_rank=place.local_rank,
                local_world_size=place.local_world_size,
                node=place.node,
                agent_pid=os.getppid(),
            )
            return train_worker(request, process)
    except Exception as error:
        # Not the one that was prepared: it is rank 0's, and after a restart the first one's.
        error.__dict__["run_dir"] = run_dir
        if not by_network(error):
            raise
        if how.stop() is not None and not has_stepped:  # the others got the signal too, and have gone
            raise KeyboardInterrupt from None
        time.sleep(_CAUSE_S)
        what = re.sub(r"^\[\S*\] ", "", str(error).splitlines()[0]).partition(". ")[0]  # without torch's own file names
        lost = RunError(f"the connection to another worker broke; it failed, was killed or hangs ({what})")
        lost.__dict__["run_dir"] = run_dir
        raise lost from None


def is_told(error: BaseException) -> bool:
    """Whether another worker on this machine tells this error; details in parentheses may differ by worker."""
    errors_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not errors_file:
        return False
    words = f"{type(error).__name__} {str(error).partition(' (')[0]}"
    # Next to the folders that torchrun makes for each worker of this start.
    mark = Path(errors_file).parents[1] / f"told-{hashlib.sha256(words.encode()).hexdigest()[:16]}"
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return True
    except OSError:
        return False
    return False


def listen(place: Place) -> int | None:
    """The descriptor of a socket on the loopback for the workers of one machine to meet at, where rank 0 opens it."""
    if place.rank != 0 or place.has_store or place.host != "127.0.0.1":
        return None
    return socket.create_server((place.host, place.port), backlog=4096).detach()


def _network(place: Place, recipe: Recipe) -> dict[str, str]:
    """What Gloo and NCCL are told; what the user has exported stays."""
    given = nccl_environment(recipe.nccl)
    address = "127.0.0.1" if place.num_nodes == 1 else _address_towards(place.host)
    if address is None or (place.num_nodes > 1 and address.startswith("127.")):
        return given  # rank 0's machine may know its own name as a loopback address, which is no use to the others
    return {
        name: value
        for name, value in network_environment(address, given).items()
        if name in given or name not in os.environ
    }


def _address_towards(host: str) -> str | None:
    """This machine's address on the network that `host` is reached by."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))  # sends nothing
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _threads(recipe: Recipe, place: Place) -> int:
    cluster = recipe.cluster
    share = max(1, usable_cores() // place.local_world_size)
    return cluster.threads_per_worker or cluster.cpus_per_worker or share


def _meet(place: Place, timeout_s: float, stop: Callable[[], str | None]) -> "tuple[Store | None, Meeting]":
    """torchrun's store, where it keeps one, and where the workers find each other."""
    from torch._C._distributed_c10d import TCPStore

    from shoal.core.group import Meeting

    meeting = Meeting(place.rank, place.world_size, place.host, place.port, timeout_s, listen_fd=listen(place))
    if not place.has_store:
        return None, meeting
    store = TCPStore(place.host, place.port, timeout=datetime.timedelta(seconds=timeout_s), is_master=False)
    return store, dataclasses.replace(meeting, hosted=True, prefix=_own_part(store, place, timeout_s, stop))


def _own_part(store: "Store", place: Place, timeout_s: float, stop: Callable[[], str | None]) -> str:
    """A part of torchrun's store that is only of this start of the workers.

    The store still holds where earlier workers listened, and torch would call there. So all agree on a new name first:
    rank 0 makes it up, and once everybody has answered to it, lists the answers. Who finds its own has the right one.
    """
    own = secrets.token_hex(8)
    part = f"{_START}/{own}"
    if place.rank == 0:
        store.set(_START, part)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if stop() is not None:  # others have failed, and torchrun waits for this one
            raise KeyboardInterrupt
        if place.rank == 0:
            expected = [f"{part}/{rank}" for rank in range(1, place.world_size)]
            if store.check(expected):
                store.set(f"{part}/answers", json.dumps([store.get(key).decode() for key in expected]))
                return part
        elif store.check([_START]):
            part = store.get(_START).decode()
            store.set(f"{part}/{place.rank}", own)
            if store.check([f"{part}/answers"]) and own in json.loads(store.get(f"{part}/answers")):
                return part
        time.sleep(0.05)
    raise RunError(f"worker {place.rank} waited {timeout_s:g} s for the others to start; look at their machines")


def _agree_on_run(
    prepared: Prepared, how: Launch, place: Place, store: "Store | None", group: "Group"
) -> dict[str, Any]:
    """What run this is: rank 0's, and after a restart that of the first start."""
    from shoal.train.restore import on_first

    restarts = max(group.gather(place.restarts))
    run: dict[str, Any] = on_first(group, lambda: _find_run(prepared, how, store, restarts))
    return run | {"restarts": restarts}


def _find_run(prepared: Prepared, how: Launch, store: "Store | None", restarts: int) -> dict[str, Any]:
    if store is not None and store.check([_RUN]):
        run: dict[str, Any] = json.loads(store.get(_RUN))
        folder = Path(run["run_dir"])
        began = (folder / "events.jsonl").is_file()
        if began:
            _note_restart(folder, how, restarts)
        return run | {"resume": prepared.resume or began, "first_step_s": _first_step_s(folder, run["started"])}
    if not prepared.resume:
        if store is None and restarts:
            raise UserError(
                "--resume: the workers were started again and cannot know their run, because torchrun keeps no store "
                "with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1; unset that, or go on with --resume RUN"
            )
        check_is_new(prepared.run_dir)
    run = {"run_dir": str(prepared.run_dir.absolute()), "started": how.started}
    if store is not None:
        store.set(_RUN, json.dumps(run))
    return run | {"resume": prepared.resume}


def _note_restart(folder: Path, how: Launch, restarts: int) -> None:
    how.console.event("restart", {"restarts": restarts})
    append_event(folder / "events.jsonl", event_record("restart", {"restarts": restarts}))


def _first_step_s(folder: Path, started: float) -> float | None:
    """Seconds to the first step, where workers before a restart have made it."""
    steps = [event["time"] for event in read_events(folder) if event["event"] == "first_step"]
    return next((made - started for made in steps if made >= started), None)
