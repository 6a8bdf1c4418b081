"""Texts on a CUDA device; skipped where there is none."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from hvdtrain.core.position import Position
from hvdtrain.loop.feed.feed import Feed
from hvdtrain.loop.feed.order import BatchSizes
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.recipe import optim
from hvdtrain.tasks.text import data
from hvdtrain.tasks.text.model import BertForClassification, BertForMaskedLM, sizes_of
from hvdtrain.tasks.text.settings import tiny
from hvdtrain.tasks.text.task import text_task
from tests import texts
from tests.steps import step_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(("task", "precision"), [("classify", "fp16"), ("mlm", "bf16")])
def test_a_run_on_a_gpu_learns(tmp_path, task, precision):
    texts.put(tmp_path / "texts", train=960, test=96)
    words = ["--data", "json", "--data-dir", "texts", "--vocab-size", "200", "--global-batch-size", "32"]
    words += ["--accumulate-steps", "1", "--epochs", "10", "--task", task, "--precision", precision, "--run", "r"]
    command = ["horovodrun", "-np", "1", sys.executable, "-m", "hvdtrain.bert", *words]
    subprocess.run(command, cwd=tmp_path, check=True)
    folder = tmp_path / "runs" / "bert" / "r"
    result = json.loads((folder / "result.json").read_text())
    if task == "classify":
        assert result["eval_accuracy"] > 0.9  # each label has words of its own
    else:
        assert result["eval_perplexity"] < 10  # of ten words
    assert json.loads((folder / "placement.json").read_text())["ranks"][0]["device"] == "cuda:0"


@pytest.mark.parametrize("task", ["classify", "mlm"])
def test_a_step_and_its_input_never_wait_for_the_device(tmp_path, monkeypatch, task):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = texts.put(tmp_path / "texts", train=96)
    config = replace(tiny(), data="json", data_dir=folder, vocab_size=200, task=task)
    found = data.load_on_all(SerialComm(), config, None)
    sizes = sizes_of("bert_tiny", vocabulary=len(found.vocabulary.tokens))
    built = BertForMaskedLM(sizes) if task == "mlm" else BertForClassification(sizes, len(found.labels))
    model, learned = built.to(CUDA).train(), text_task(config, found)
    groups = optim.parameter_groups(model, 0.01, decay_all=False)
    step = step_of(model, task=learned, optimizer=optim.BUILD["adamw"](groups, 1e-3), witnesses=[])
    cuts = BatchSizes(micro_batch=8, global_batch=16, steps_per_epoch=6)
    feed = Feed(found.train, learned, SerialComm(), cuts, seed=0, device=CUDA)
    coming = feed.micro_batches(feed.batches(Position()), 0)

    def one():
        batch, inputs = next(coming)
        return step(
            inputs,
            backward_passes=len(batch.indices),
            global_count=batch.global_count,
            lr=1e-3,
            measure=False,
        )

    one().read()
    one().read()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = [one() for _ in range(3)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [taken.read().skipped for taken in pending] == [None] * 3
