"""Two runs on TensorBoard's pages, as a person sees them in Chromium."""

import json
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from hvdtrain.core.finite import Skipped
from hvdtrain.insight.tracking.tracker import Tracker
from hvdtrain.settings.safety.exits import FINISHED
from tests.unit.loop.reported import IMAGES, epoch_of, report_of

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.browser

ACCURACY = {"study/one": 0.625, "study/two": 0.875}
SEEN_S = 60  # how long a page may take on a busy machine


def leave_run(folder, *, ranks, accuracy):
    folder.mkdir(parents=True)
    tracker = Tracker(folder, is_writer=True, task=IMAGES, result={"np": ranks})
    tracker.describe(settings={"ranks": ranks, "recipe": "scaled", "seed": 0}, command=["python"], config={"epochs": 5})
    for epoch in range(1, 6):
        done = epoch / 5
        metrics = {"loss": 2 - done, "accuracy": accuracy * done}
        skipped = [(20 * epoch, Skipped(rank=0, source="loss"))] if epoch == 2 else []
        tracker.record(report_of(20 * epoch, metrics=metrics, skipped=skipped, units_per_s=[100.0] * ranks))
        tracker.record_epoch(epoch_of(epoch, train_s=4 / ranks, train=metrics, test=metrics))
    tracker.conclude(FINISHED)


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """TensorBoard's address; it shows both runs."""
    runs = tmp_path_factory.mktemp("runs")
    for ranks, (name, accuracy) in enumerate(ACCURACY.items(), start=1):
        leave_run(runs / name, ranks=ranks, accuracy=accuracy)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = f"-m tensorboard.main --logdir {runs} --host 127.0.0.1 --port {port}".split()
    with (runs / "log").open("w") as log, subprocess.Popen([sys.executable, *words], stdout=log, stderr=log) as server:
        try:
            end = time.monotonic() + SEEN_S
            while not serves(f"http://127.0.0.1:{port}"):
                assert (server.poll(), time.monotonic() < end) == (None, True), (runs / "log").read_text()
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()


def serves(address):
    try:
        with urllib.request.urlopen(f"{address}/data/runs", timeout=5) as answer:  # noqa: S310 (our own server)
            return set(json.load(answer)) == set(ACCURACY)
    except OSError:
        return False


def sees(page, *texts):
    for text in texts:
        playwright.expect(page.get_by_text(text, exact=True).first).to_be_visible(timeout=1000 * SEEN_S)


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 1700, "height": 1000})
    page.set_default_timeout(1000 * SEEN_S)
    yield page
    page.close()


@pytest.mark.slow
def test_scalars_page_has_both_runs_and_groups_that_begin_with_the_result(page, board):
    page.goto(f"{board}/#scalars")
    sees(page, *ACCURACY, "eval/accuracy", "eval/loss", "train/loss", "train/grad_norm")
    headings = [text.split()[0] for text in page.locator("tf-category-paginated-view button.heading").all_inner_texts()]
    assert headings == ["eval", "train", "train_by_epoch", "train_by_rank", "usage"]


@pytest.mark.slow
def test_hparams_page_has_both_runs_with_settings_and_final_metrics(page, board):
    page.goto(f"{board}/#hparams")
    sees(page, "ranks", "recipe", "test accuracy", *ACCURACY, *(f"{accuracy:.5f}" for accuracy in ACCURACY.values()))


def test_make_board_is_for_this_machine_only():
    words = ["make", "--dry-run", "board", "PORT=7007"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert "tensorboard --logdir runs --host 127.0.0.1 --port 7007" in done.stdout
