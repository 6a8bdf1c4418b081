"""The opening lines of a run: its size in five lines, and a warning if it is too short to learn anything."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.insight.tracking.console import Console

# With two classes of 240 texts that one word distinguishes, bert_tiny's test accuracy was 50 % after 25 steps, 75 %
# after 30 and 97 % after 50. Images of digits need fewer: 87 % after 12 steps, 95 % after 24.
FEW_STEPS = 30


def opening_lines(
    known: Mapping[str, Any], ranks: Sequence[Mapping[str, Any]], *, unit: str, folder: Path
) -> list[str]:
    """Return at most five lines from the settings with derived values, and from the facts of each rank."""
    classes = f", {known['classes']:,} classes" if known.get("classes") else ""
    micro_batch, passes = known["micro_batch"], known["accumulate_steps"]
    per_replica = f"{passes} x {micro_batch:,}" if passes > 1 else f"{micro_batch:,}"
    replicas = _count(known["global_batch"] // (micro_batch * passes), "replica")
    hosts = sorted({rank["host"] for rank in ranks})
    devices = Counter(
        rank["device_name"] if rank["device"].startswith("cuda") else f"CPU ({rank['device_name']})" for rank in ranks
    )
    by_device = ", ".join(f"{count} x {name}" for name, count in sorted(devices.items()))
    data = f"{known['train_samples']:,} {unit} to train on, {known['test_samples']:,} to test with{classes}"
    batch = f"{known['global_batch']:,} {unit} ({replicas} x {per_replica})"
    return [
        f"data: {known['data']}, {data}",
        f"model: {known['model']}, {known['parameters']:,} parameters",
        f"ranks: {len(ranks)} on {hosts[0] if len(hosts) == 1 else f'{len(hosts)} hosts'}; {by_device}",
        f"global batch: {batch}; {_count(known['steps'], 'step')} in {_count(known['epochs'], 'epoch')}",
        f"run folder: {folder}",
    ]


def warn_of_few_steps(known: Mapping[str, Any], console: Console) -> None:
    """Print a warning if the whole run has fewer steps than any model needs to learn."""
    if known["steps"] >= FEW_STEPS:
        return
    batch = "--batch-size-per-rank" if known["global_batch_size"] is None else "--global-batch-size"
    length = "--epochs" if known.get("max_steps") is None else "--max-steps"
    run = f"{_count(known['epochs'], 'epoch')} {'is' if known['epochs'] == 1 else 'are'}"
    steps = f"{_count(known['steps'], 'step')}: few models learn in fewer than {FEW_STEPS}"
    console.print_message("warning", f"{run} {steps}. Lower {batch} or raise {length}.")


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
