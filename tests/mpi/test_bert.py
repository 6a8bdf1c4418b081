"""The second program: what a run of text leaves behind, that ranks do not matter to it, and how it ends."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests import texts
from tests.mpi.conftest import BERT, end_well, launcher_of, program_of
from tests.mpi.interrupted import Runs, refusal, same_end
from tests.mpi.launched import argv, finished
from tests.refusals import require_facts

WORDS = ["--data", "json", "--data-dir", "texts", "--vocab-size", "200", "--run", "r", "--report-every-steps", "3"]

HOROVOD = ["--reducer", "horovod"]


@pytest.fixture(autouse=True)
def data(tmp_path):
    return texts.put(tmp_path / "texts")


@pytest.mark.parametrize("launcher", ["horovodrun", "hvdlaunch"])
def test_a_run_leaves_a_whole_run_folder_and_a_model(run, tmp_path, launcher):
    with (tmp_path / "texts" / "test.jsonl").open("a") as file:
        file.write('{"text": "cat %", "label": "animals"}\n')
    words = ["-m", "hvdtrain.bert", *WORDS, "--epochs", "2"]  # word by word, as a user starts it
    done = run(launcher, 2, [*words, "--global-batch-size", "8", "--export", "model"])
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "runs" / "bert" / "r"
    result = json.loads((folder / "result.json").read_text())
    assert (result["exit_reason"], result["np"], result["steps"], result["epochs"]) == ("finished", 2, 12, 2)
    assert {"train_samples_per_s", "eval_accuracy", "eval_f1", "eval_loss", "best_accuracy"} <= set(result)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "epoch" not in line] == [3, 6, 9, 12]
    assert [line["eval/f1"] for line in lines if "epoch" in line][-1] == result["eval_f1"]
    events = EventAccumulator(str(folder)).Reload()
    assert [one.step for one in events.Scalars("eval/f1")] == [6, 12]
    assert f"test accuracy {result['eval_accuracy']:.2%}" in done.stdout
    assert "% of the tokens are [UNK]: the vocabulary has no pieces for them" in done.stdout
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer_config.json",
        "vocab.txt",
    ]
    assert json.loads((folder / "config.json").read_text())["derived"]["classes"] == 3


# Adam makes steps of what is zero but for rounding, as the keys' bias.
EXACT = (*WORDS, "--dropout", "0", "--optimizer", "sgd", "--lr", "0.5", "--export", "model")
TWO_EPOCHS = (*EXACT, "--epochs", "2", "--clip-norm", "1e6")  # to clip would hide a wrong scale


def exported(folder, ranks, words, **lengths):
    """The weights after a training in this folder."""
    folder.mkdir(exist_ok=True)
    texts.put(folder / "texts", **lengths)
    end_well(folder, launcher_of(ranks), ranks, [*BERT, *words])
    return load_file(folder / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The weights after two epochs, by task, ranks, batches per step, and global batch."""

    @cache
    def weights(task, ranks, accumulate, *, global_batch=12, train=50):
        words = [*TWO_EPOCHS, "--task", task, *(HOROVOD if accumulate > 1 else [])]
        words += ["--global-batch-size", str(global_batch), "--accumulate-steps", str(accumulate)]
        return exported(tmp_path_factory.mktemp("trained"), ranks, words, train=train, longest=64)

    return weights


def difference(one, other):
    """The largest of any weight."""
    assert one.keys() == other.keys()
    return max((weight - other[name]).abs().max().item() for name, weight in one.items())


def test_ranks_and_accumulation_do_not_matter(trained):
    """Texts of 1 to 64 words in batches of 10; with 12 micro-batches some of them are empty."""
    assert difference(trained("mlm", 1, 1), trained("mlm", 3, 4)) < 1e-6


def test_a_rank_without_a_text_does_not_matter(trained):
    """Four texts in two batches of two, for three ranks."""
    alone, many = (trained("classify", ranks, 1, global_batch=3, train=4) for ranks in (1, 3))
    assert difference(alone, many) < 1e-6


INTERRUPTED = (*WORDS, "--global-batch-size", "8", "--checkpoint-every", "1steps")


def runs_in(folder, words, **lengths):
    texts.put(folder / "texts", **lengths)
    return Runs(folder=folder, ranks=2, words=tuple(words), script="bert")


def test_a_run_that_was_killed_ends_as_if_it_had_not_been(tmp_path, tmp_path_factory):
    words = [*INTERRUPTED, "--task", "mlm", "--max-steps", "9", *HOROVOD, "--compression", "fp16"]
    whole, broken = runs_in(tmp_path_factory.mktemp("whole"), words), runs_in(tmp_path, words)
    whole.finish()
    assert (whole.result["steps"], whole.result["epochs"]) == (9, 2)  # max-steps ends it in the middle of an epoch
    perplexity = torch.tensor(whole.result["eval_loss"]).exp().item()
    assert whole.result["eval_perplexity"] == pytest.approx(perplexity, rel=1e-4)
    broken.killed("step3", saved=2)
    broken.finish()
    same_end(broken, whole)
    assert broken.result["resumed"] == 1


DIES_LATE = """
import os, runpy
from hvdtrain.insight.tracking.recorder import Conclusion
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    Conclusion.trained = lambda *_: os._exit(9)
runpy.run_module("hvdtrain.bert", run_name="__main__")
"""


@pytest.mark.slow
def test_a_run_that_dies_after_its_last_save_has_each_line_once_and_replaces_its_own_export(tmp_path):
    words = [*INTERRUPTED, "--max-steps", "9", "--export", "model"]
    dies = ["python", program_of(tmp_path, DIES_LATE), *words]
    done = finished(tmp_path, argv("--restarts", "1", "-np", "1", program=dies))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "restart 1 of 1" in done.stderr
    assert (tmp_path / "model" / "model.safetensors").exists()
    lines = map(json.loads, (tmp_path / "runs" / "bert" / "r" / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if not {"epoch", "event"} & line.keys()] == list(range(1, 10))
    done = finished(tmp_path, ["python", "-m", "hvdtrain.bert", *words, "--run", "other"])
    assert done.returncode == 2
    assert "--export model: not empty" in refusal(done.stdout + done.stderr)


@pytest.mark.slow
def test_a_run_that_goes_on_with_more_ranks_ends_with_the_same_weights(tmp_path, trained):
    words = (*TWO_EPOCHS, "--task", "mlm", "--global-batch-size", "12", "--accumulate-steps", "1")
    words = (*words, "--checkpoint-every", "1steps")
    broken = runs_in(tmp_path, words, train=50, longest=64)
    broken.killed("step5", saved=4)
    said = replace(broken, ranks=3).finish()
    assert "3 ranks instead of 2: the global batch is kept, 12 samples per step instead of 12" in said
    assert difference(trained("mlm", 1, 1), load_file(tmp_path / "model" / "model.safetensors")) < 1e-6


def test_bad_input_is_one_line_and_status_2(run, tmp_path):
    done = run("mpirun", 2, [*BERT, *WORDS, "--columns", "text,class"])
    assert done.returncode == 2
    require_facts(refusal(done.stdout + done.stderr), "--columns: no LABEL column 'class' in ... texts/train.jsonl:1")
    assert not (tmp_path / "runs").exists()


SLOW = """
import runpy, time
from hvdtrain.tasks.text import tokens
def late(*given, write=tokens._write):
    time.sleep(6)
    write(*given)
tokens._write = late
runpy.run_module("hvdtrain.bert", run_name="__main__")
"""


@pytest.mark.slow
def test_texts_may_take_longer_to_become_numbers_than_horovod_lets_ranks_wait(run, tmp_path):
    """The others wait in a collective of Horovod's, whose Gloo controller ends no job for that (0.28.1)."""
    stall = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    done = run("gloo", 2, [program_of(tmp_path, SLOW), *WORDS, "--global-batch-size", "8", "--max-steps", "1"], **stall)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Stalled" not in done.stdout + done.stderr
