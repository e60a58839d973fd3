"""The workers of a run as a launcher sees them, and those that live on this machine."""

import socket
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Protocol

from shoal.launch.agent import Agent
from shoal.launch.nursery import new_nursery_name

LOOPBACK = "127.0.0.1"


class Member(Protocol):
    """A place where a worker can run."""

    node: str
    """The machine, by a name that is its own."""
    host: str
    """The machine, by the name that people know."""
    address: str
    """Where workers on other machines reach it."""

    def call(self, method: str, *arguments: Any) -> "Future[Any]":
        """Have the agent there do something; the future raises where the agent is gone."""
        ...


class Crew(Protocol):
    """All the places that a run has, as they come and go."""

    def members(self) -> list[Member]:
        """Those that are ready, in the order of the ranks they will have."""
        ...

    def expects_more(self) -> bool:
        """Whether others are about to be ready."""
        ...

    def leaving(self) -> set[str]:
        """Machines that have announced that they will go."""
        ...

    def drop(self, member: Member) -> None:
        """Give up a place that is lost or about to be; another is looked for."""
        ...

    def obstacle(self) -> str | None:
        """Why there will never be enough places, in words; None while there may be."""
        ...

    def waiting_for(self) -> str:
        """What is being waited for, in words."""
        ...

    def close(self) -> None:
        """Let go of every place."""
        ...


class LocalMember:
    """A worker's place on this machine."""

    def __init__(self, nursery: str, executor: ThreadPoolExecutor) -> None:
        self.node = self.host = socket.gethostname()
        self.address = LOOPBACK
        self._agent = Agent(nursery, lease_s=None)
        self._executor = executor

    def call(self, method: str, *arguments: Any) -> "Future[Any]":
        """As `Member`."""
        return self._executor.submit(getattr(self._agent, method), *arguments)


class LocalCrew:
    """Workers on this machine, in processes of their own."""

    def __init__(self, workers: int) -> None:
        self._executor = ThreadPoolExecutor(max_workers=4 * workers, thread_name_prefix="crew")
        self._nursery = new_nursery_name()
        self._members = [LocalMember(self._nursery, self._executor) for _ in range(workers)]

    def members(self) -> list[Member]:
        """All of them, always."""
        return list(self._members)

    def expects_more(self) -> bool:
        """Never."""
        return False

    def leaving(self) -> set[str]:
        """This machine does not announce its end."""
        return set()

    def drop(self, member: Member) -> None:
        """A new place instead."""
        member.call("close")
        self._members = [
            LocalMember(self._nursery, self._executor) if other is member else other for other in self._members
        ]

    def obstacle(self) -> str | None:
        """Nothing."""
        return None

    def waiting_for(self) -> str:
        """Nothing."""
        return ""

    def close(self) -> None:
        """End every process."""
        wait([member.call("close") for member in self._members])
        self._executor.shutdown()
