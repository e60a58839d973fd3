"""What `shoal bench step --peers` prints."""

from collections.abc import Mapping
from typing import Any


def table(result: Mapping[str, Any]) -> list[list[str]]:
    """Contenders as rows of text, headed; a column for what each of Shoal is to them."""
    ratios, rows = result["ratios"], result["contenders"]
    has_mfu = any(row["mfu"] for row in rows.values())
    memory = "peak GiB" if any(row["reserved_bytes"] for row in rows.values()) else "process GiB"
    head = ["contender", "ms a step", result["unit"], *(f"{name} to it" for name in ratios), memory, "compile, s"]
    lines = [[*head, *(["MFU"] if has_mfu else []), "first loss", "last loss", "difference"]]
    for name, row in rows.items():
        line = [name, f"{row['step_ms']:.3f}", f"{row['rate']:,.0f}"]
        line += [f"{each['to_each'][name]['ratio']:.3f}" if name in each["to_each"] else "" for each in ratios.values()]
        line += [f"{row['peak_bytes'] / 2**30:.2f}", f"{row['compile_s']:.1f}"]
        if has_mfu:
            line.append(f"{row['mfu']:.1%}" if row["mfu"] else "")
        line += [f"{row['first_loss']:.4f}", f"{row['last_loss']:.4f}", f"{row['loss_difference']:+.4f}"]
        lines.append(line)
    return lines


def notes(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What must be said beside the table."""
    told = [("not measured", f"{name}: {why}") for name, why in result["not_measured"].items()]
    for name, ratio in result["ratios"].items():
        if "to_best" not in ratio:
            continue
        told.append(("ratio", f"{name} to {ratio['best_peer']}, the best peer: {words(ratio['to_best'])}"))
        for kind in ("eager", "compiled"):
            peer = ratio.get(f"best_{kind}")
            if peer is not None and peer != ratio["best_peer"]:
                told.append(("ratio", f"{name} to {peer}, the best {kind} peer: {words(ratio['to_each'][peer])}"))
        if "to_shoal" in ratio:
            told.append(("ratio", f"{name} to shoal: {words(ratio['to_shoal'])}"))
    told += [("memory", line) for line in _memory(result)]
    told += [("note", note) for note in result["notes"]]
    peer = next((row["loss_reference"] for row in result["contenders"].values() if "loss_reference" in row), "")
    last = min(50, next(iter(result["contenders"].values()))["num_losses"])
    told.append(
        ("loss", f"last: the mean of steps up to the {result['opening']}th, the last {last}; difference: to {peer}")
    )
    told.append(("measured", f"{_rounds(result)} of {result['steps']} steps on {result['device']}"))
    return told


def _rounds(result: Mapping[str, Any]) -> str:
    starts, rounds = result["starts"], result["rounds"]
    return f"{rounds} rounds" if starts == 1 else f"{starts} starts, each with {rounds} rounds"


def words(ratio: Mapping[str, Any]) -> str:
    """A ratio with its spread."""
    low, high = ratio["interval"]
    span = f"{ratio['least']:.3f} to {ratio['most']:.3f}"
    return f"{ratio['ratio']:.3f} times as fast (95%: {low:.3f} to {high:.3f}; rounds: {span})"


def _memory(result: Mapping[str, Any]) -> list[str]:
    rows = result["contenders"]
    lines = []
    for name, ratio in result["ratios"].items():
        if "to_best" not in ratio or not rows[name]["reserved_bytes"]:
            continue
        peers = {peer: rows[peer]["peak_bytes"] for peer in ratio["to_each"]}
        least, most = min(peers, key=peers.__getitem__), max(peers, key=peers.__getitem__)
        own = rows[name]["peak_bytes"] / 2**30
        lines.append(
            f"{name} takes {own:.2f} GiB at most; of its peers {least} takes {peers[least] / 2**30:.2f}, "
            f"{most} {peers[most] / 2**30:.2f}"
        )
    return lines


def bars(result: Mapping[str, Any]) -> dict[str, float]:
    """For the plot."""
    return {name: row["step_ms"] for name, row in result["contenders"].items()}


def sweep_table(result: Mapping[str, Any]) -> list[list[str]]:
    """A row for each model and contender of Shoal."""
    lines = [["model", "contender", "ms a step", "best peer", "ms a step", "ratio", "95%", "rounds"]]
    for model, one in result["models"].items():
        for name, ratio in one["ratios"].items():
            if "to_best" not in ratio:
                continue
            best, to_best = ratio["best_peer"], ratio["to_best"]
            rows = one["contenders"]
            low, high = to_best["interval"]
            lines.append(
                [
                    *(model, name, f"{rows[name]['step_ms']:.3f}", best, f"{rows[best]['step_ms']:.3f}"),
                    *(f"{to_best['ratio']:.3f}", f"{low:.3f}-{high:.3f}"),
                    f"{to_best['least']:.3f}-{to_best['most']:.3f}",
                ]
            )
    return lines


def sweep_bars(result: Mapping[str, Any]) -> dict[str, float]:
    """How many times as fast as the best peer, of each model."""
    return {
        f"{model}, {name}": ratio["to_best"]["ratio"]
        for model, one in result["models"].items()
        for name, ratio in one["ratios"].items()
        if "to_best" in ratio
    }
