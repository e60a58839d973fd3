"""How a run ended, in words."""

from pathlib import Path

from shoal.observe.console import format_metric
from shoal.observe.event_words import one_line
from shoal.observe.monitor.facts import Facts
from shoal.observe.number_words import duration
from shoal.observe.runs import resume_command


def ending(facts: Facts) -> str:
    """How a run ended, in one line."""
    went_on = f"; go on with: {resume_command(Path(facts.run_dir), facts.launch)}"
    if facts.status == "gone":
        return f"the run's folder is gone: {facts.run_dir}"
    if facts.status == "failed":
        return f"failed at step {facts.step:,}: {one_line(facts.error) or 'no word why'}{went_on}"
    if facts.status == "interrupted":
        return f"interrupted at step {facts.step:,}{went_on}"
    if facts.status == "stopped":
        return f"stopped at step {facts.step:,} without a word, and nobody trains there now{went_on}"
    names = ("train_loss", *sorted(name for name in facts.metrics if name.startswith("val_")))
    metrics = "  ".join(f"{name} {format_metric(name, facts.metrics[name])}" for name in names if name in facts.metrics)
    return f"done: {facts.step:,} steps in {duration(facts.elapsed_s)}" + (f"  {metrics}" if metrics else "")
