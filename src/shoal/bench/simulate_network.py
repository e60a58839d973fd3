"""How long workers take to exchange data over a network that is not here: rings and trees, as NCCL chooses them.

Every constant of a network is in `NETWORKS`; `docs/benchmarks.md` names their sources. Times are those of NCCL's own
model (`src/graph/tuning.cc`), cut down to what data-parallel training sends: a message costs a start, a latency for
each hop, and its bytes over the narrowest place that they pass.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from shoal.core.errors import UserError
from shoal.core.section import one_of

Collective = Literal["all_reduce", "all_gather", "reduce_scatter"]


@dataclass(frozen=True)
class Members:
    """Who takes part in a collective."""

    size: int
    on_node: int
    """Of them on each machine."""
    alike: int = 1
    """Groups on each machine that do the same at the same time, and share its network with this one."""

    @property
    def nodes(self) -> int:
        """Machines that they are on."""
        return self.size // self.on_node


@dataclass(frozen=True)
class Message:
    """What one collective costs."""

    seconds: float
    busy: float = 0.0
    """What it takes meanwhile of what its worker computes with; 1 is all of it."""


class Wires(Protocol):
    """What a simulated step asks a network."""

    @property
    def waits(self) -> bool:
        """Whether a worker computes nothing while FSDP or PowerSGD send, as on the CPU."""
        ...

    def message(self, collective: Collective, num_bytes: float, members: Members, dtype: str = "fp32") -> Message:
        """What it costs to exchange so many bytes; `num_bytes` is what a worker holds of it where it is whole."""
        ...


@dataclass(frozen=True)
class Network:
    """GPUs in machines."""

    name: str
    inside_gb_per_s: float
    """What one GPU sends to others of its machine, in 10^9 bytes a second; it receives as much meanwhile."""
    between_gb_per_s: float
    """What one network card sends to other machines."""
    between_of: Literal["gpu", "node"]
    """Whether every GPU has a card of its own, or a machine has one."""
    inside_us: float = 3.4
    """From one GPU to the next of its machine, each time that data are passed on; microseconds."""
    between_us: float = 14.0
    """The same from one machine to the next."""
    start_us: float = 8.4
    """Of every collective, before anything moves."""
    memory_gb_per_s: float = 3350.0
    """Of a GPU's own memory: what packing gradients goes through."""

    @property
    def waits(self) -> bool:
        """GPUs compute while they send."""
        return False

    def message(self, collective: Collective, num_bytes: float, members: Members, dtype: str = "fp32") -> Message:
        """By the fastest of a ring, a ring that sends small packets at once, and for sums a tree."""
        if members.size == 1:
            return Message(0.0)
        ways = [self._ring(collective, num_bytes, members, short) for short in (False, True)]
        if collective == "all_reduce":
            ways += [self._tree(num_bytes, members, short) for short in (False, True)]
        return Message(min(ways))

    def _rate(self, members: Members) -> float:
        """Bytes a second at the narrowest place of a ring."""
        inside = self.inside_gb_per_s if members.on_node > 1 else math.inf
        if members.nodes == 1:
            return 1e9 * inside
        cards = members.on_node if self.between_of == "gpu" else 1 / members.alike
        return 1e9 * min(inside, cards * self.between_gb_per_s)

    def _latencies_s(self, short: bool) -> tuple[float, float, float]:
        """Start, and a hop inside and between machines."""
        shares = _SHORT_SHARES if short else (1.0, 1.0, 1.0)
        whole = (self.start_us, self.inside_us, self.between_us)
        return tuple(1e-6 * us * share for us, share in zip(whole, shares, strict=True))  # type: ignore[return-value]

    def _ring(self, collective: Collective, num_bytes: float, members: Members, short: bool) -> float:
        start, inside, between = self._latencies_s(short)
        rounds = 2 if collective == "all_reduce" else 1
        crossings = members.nodes - 1
        if crossings and short:
            inside = max(inside, min(_POST_S, between))
        hops = (members.size - 1 - crossings) * inside + crossings * between
        if crossings and not short and collective == "all_reduce":
            hops *= _PLATEAU
        rate = self._rate(members)
        if short:
            rate = min(_SHORT_RATE * rate, _SHORT_MOST[min(members.nodes, 3)])
        return start + rounds * (hops + num_bytes * (members.size - 1) / members.size / rate)

    def _tree(self, num_bytes: float, members: Members, short: bool) -> float:
        start, inside, between = self._latencies_s(short)
        hops = (members.on_node - 1) * inside + math.ceil(math.log2(members.nodes)) * between
        rate = self._rate(members) * (_SHORT_TREE_RATE if short else _TREE_RATE)
        return start + 2 * (hops + num_bytes / rate)


_SHORT_SHARES = (6.6 / 8.4, 0.6 / 3.4, 5.0 / 14.0)
"""NCCL's LL protocol sends flags with the data and waits for less: its latencies over those of Simple."""
_SHORT_RATE, _TREE_RATE, _SHORT_TREE_RATE = 0.5, 0.92, 1 / 3.8
"""Of the rate of a ring under Simple."""
_SHORT_MOST = {1: 141e9, 2: 45e9, 3: 35e9}
"""The most that LL carries on H100s, in bytes a second; on one machine, on two, on more."""
_POST_S = 1e-6
"""Of handing something to a network card, which every hop of a ring between machines waits for."""
_PLATEAU = 1.4
"""How much longer than its hops an all-reduce by a ring between machines takes to fill, as NCCL corrects it."""

_NVLINK, _NDR, _ETHERNET = 18 * 20.6, 48.0, 12.5 * 1448 / 1538
"""NVLink 4 as NCCL counts on it; InfiniBand NDR, 400 Gb/s less its headers; 100 Gb/s less those of Ethernet and TCP."""
NETWORKS = {
    "nvlink+ib": Network("nvlink+ib", _NVLINK, _NDR, "gpu"),
    "nvlink+100gbe": Network("nvlink+100gbe", _NVLINK, _ETHERNET, "node", between_us=30.0),
    "pcie+100gbe": Network("pcie+100gbe", 24.0, _ETHERNET, "node", inside_us=5.7, between_us=30.0),
    "free": Network("free", math.inf, math.inf, "gpu", 0.0, 0.0, 0.0, math.inf),
}
"""Machines with eight H100s or the like. `free` costs nothing: what is left is what a strategy costs by itself."""
FIGURES = ("inside_gb_per_s", "between_gb_per_s", "inside_us", "between_us", "start_us", "memory_gb_per_s")


def find_network(name: str, given: Mapping[str, float | None] | None = None) -> Network:
    """A network by its name, or from a YAML file; `given` are figures that are to be others."""
    network = NETWORKS.get(name)
    if network is None and name.endswith((".yaml", ".yml")):
        network = _read(Path(name))
    if network is None:
        raise UserError(f"--network: {name!r} is no network; {one_of(name, NETWORKS)}, or a file NAME.yaml")
    changes = {key: value for key, value in (given or {}).items() if value is not None}
    for key, value in changes.items():
        _check_figure(f"--{key.replace('_', '-')}", key, value)
    return _changed(network, network.name + " with changes", changes) if changes else network


def _changed(network: Network, name: str, changes: Mapping[str, Any]) -> Network:
    return dataclasses.replace(network, name=name, **changes)


def _read(path: Path) -> Network:
    """`base: nvlink+ib`, and under it what is to be another figure."""
    import yaml

    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--network: {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"--network: {path} is no YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(tree, dict):
        raise UserError(f"--network: {path} should hold figures by name, such as between_gb_per_s: 25")
    changes = dict(tree)
    base = changes.pop("base", "nvlink+ib")
    if str(base) not in NETWORKS:
        raise UserError(f"--network: {path}: base: {base!r} is no network; {one_of(str(base), NETWORKS)}")
    for key, value in changes.items():
        if key == "between_of":
            if value not in ("gpu", "node"):
                raise UserError(f"--network: {path}: between_of: {value!r} should be gpu or node")
        elif key not in FIGURES:
            raise UserError(f"--network: {path}: {key!r} is no figure; {one_of(str(key), [*FIGURES, 'between_of'])}")
        else:
            _check_figure(f"--network: {path}: {key}", key, value)
    return _changed(NETWORKS[base], path.stem, changes)


def _check_figure(what: str, key: str, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    is_rate = key.endswith("gb_per_s")
    if not is_number or value < 0 or (is_rate and value == 0):
        raise UserError(f"{what}: {value!r} should be a number {'above 0' if is_rate else 'of 0 or more'}")
