import multiprocessing
import random
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hvdtrain.core.settings import FileSettings
from hvdtrain.loop.feed.datasets import as_split
from hvdtrain.loop.feed.sending import Sending
from hvdtrain.ranks.comm import SerialComm
from tests.refusals import require_facts


class Rows:
    def __init__(self, **held):
        vars(self).update(held)

    def __len__(self):
        return 3

    def __getitem__(self, row):
        return torch.tensor(float(row))


def local_rows():
    class Local(Rows):
        pass

    return Local()


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (Rows(transform=lambda row: row), "lambda"),
        (Rows(lock=threading.Lock()), "lock"),
        (local_rows(), "Local"),
    ],
)
def test_the_rank_itself_reads_what_processes_cannot_receive(capsys, rows, problem):
    split = as_split(rows, FileSettings(), SerialComm(), seed=0)
    assert split.readers == 0
    require_facts(capsys.readouterr().err, f"note: reader processes cannot receive the ... {problem} ... top level")


def test_what_a_new_process_can_receive_is_sent():
    shared = multiprocessing.get_context("spawn").Value("i", 0)  # pickled for new processes only
    rows = Rows(shared=shared, values=torch.rand(3), names=np.array(["a"], dtype=object), weight=torch.nn.Linear(1, 1))
    assert Sending(rows).problem is None
    not_a_leaf = torch.ones(2, requires_grad=True) * 2
    assert "requires_grad" in Sending(Rows(values=not_a_leaf)).problem


@pytest.mark.parametrize("guarded", [True, False])
def test_a_class_below_the_guard_of_the_program_is_missing_in_its_readers(monkeypatch, tmp_path, guarded):
    file = tmp_path / "program.py"
    file.write_text("if __name__ == '__main__':\n    class Held: pass\n" if guarded else "class Held: pass\n")
    held = type("Held", (), {"__module__": "__main__"})
    monkeypatch.setitem(sys.modules, "__main__", SimpleNamespace(Held=held, __file__=str(file)))
    problem = Sending(Rows(held=held())).problem
    assert problem == ('Held is defined below `if __name__ == "__main__":`' if guarded else None)


@pytest.mark.parametrize(
    "generator",
    [torch.Generator(), np.random.default_rng(0), np.random.RandomState(0), random.Random(0)],  # noqa: S311
)
def test_a_generator_of_its_own_is_reported(capsys, generator):
    as_split(Rows(helpers=[{"rng": generator}]), FileSettings(prefetch=0), SerialComm(), seed=0)
    require_facts(
        capsys.readouterr().err, f"note: the Rows has its own {type(generator).__name__}. ... for each sample"
    )
