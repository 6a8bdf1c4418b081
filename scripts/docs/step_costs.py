"""Rows of docs/reference/step-costs.md that are counted in seconds; bench/step_costs.py counts all in minutes."""

from collections.abc import Iterator
from unittest.mock import patch

from bench import step_costs

MODELS = ("efficientnet_b0, 224 pixels", "bert_base, 128 tokens")
PUBLISHED = ("--batch-size-per-rank 64 --model efficientnet_b0", "--max-tokens 128 ")  # of the commands


def differences() -> Iterator[str]:
    """A text for each of these rows that the page does not have."""
    page = step_costs.PAGE.read_text().splitlines()
    models = {name: step_costs.MODELS[name] for name in MODELS}
    published = [row for row in step_costs.PUBLISHED if any(words in row.words for words in PUBLISHED)]
    with patch.multiple(step_costs, MODELS=models, PUBLISHED=published):
        rows = [row for part in step_costs.PARTS.values() for row in part() if row.startswith("|")]
    for row in rows:
        if row not in page:
            yield f"docs: docs/reference/step-costs.md: no row is {row} Run python bench/step_costs.py."
