"""Two runs on TensorBoard's pages, as a person sees them in Chromium."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from hvdtrain.core.finite import Skipped
from hvdtrain.safety.exits import FINISHED
from hvdtrain.tracking.tracker import Tracker
from tests.unit.loop.reported import IMAGES, epoch_of, report_of

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = pytest.mark.browser

ACCURACY = {"study/one": 0.625, "study/two": 0.875}
SEEN_S = 60  # how long a page may take on a busy machine


def leave_run(folder, *, ranks, accuracy):
    folder.mkdir(parents=True)
    tracker = Tracker(folder, is_writer=True, task=IMAGES, result={"np": ranks})
    settings = {"ranks": ranks, "recipe": "scaled", "seed": 0}
    placement = {"ranks": [{"rank": rank, "host": f"node{rank}"} for rank in range(ranks)]}
    command = ["mpirun", "-np", str(ranks), "python", "-m", "hvdtrain.effnet"]
    tracker.describe(settings=settings, command=command, config={"epochs": 5}, placement=placement)
    for epoch in range(1, 6):
        done = epoch / 5
        report = report_of(
            20 * epoch,
            totals={"loss": 40 - 20 * done, "count": 20.0, "right": 20 * accuracy * done},
            skipped=[(20 * epoch, Skipped(rank=0, source="loss"))] if epoch == 2 else [],
            lr=0.1 * (1 - done),
            grad_norm=3 - done,
            loss_scale=1.0,
            units_per_s=[100.0 + rank for rank in range(ranks)],
            usage={(0, "usage/node0/cpu_percent"): 90.0 + epoch},
            visited=20 * epoch,
        )
        tracker.record(report)
        metrics = {"loss": 2 - done, "accuracy": accuracy * done}
        tracker.record_epoch(epoch_of(epoch, train_s=4 / ranks, train=metrics, test=metrics))
    figure = Figure(figsize=(4, 2))
    figure.subplots().barh(["forward", "backward"], [1.0, 2.0])
    tracker.write_picture("phases", figure)
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
    words = [
        sys.executable,
        "-m",
        "tensorboard.main",
        "--logdir",
        str(runs),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with (runs / "log").open("w") as log:
        server = subprocess.Popen(words, stdout=log, stderr=log)
    try:
        address = f"http://127.0.0.1:{port}"
        end = time.monotonic() + SEEN_S
        while not serves(address):
            assert server.poll() is None, (runs / "log").read_text()
            assert time.monotonic() < end, (runs / "log").read_text()
            time.sleep(0.2)
        yield address
    finally:
        server.terminate()
        server.wait(10)


def serves(address):
    try:
        with urllib.request.urlopen(f"{address}/data/runs", timeout=5) as answer:  # noqa: S310 (our own server)
            return set(json.load(answer)) == set(ACCURACY)
    except OSError:
        return False


@pytest.fixture
def visit(browser, board, request):
    """Opens a page; BOARD_PICTURES=FOLDER keeps a picture of it."""
    page = browser.new_page(viewport={"width": 1700, "height": 1000})
    page.set_default_timeout(1000 * SEEN_S)

    def visit(name):
        page.goto(f"{board}/#{name}")
        return page

    yield visit
    if folder := os.environ.get("BOARD_PICTURES"):
        page.wait_for_timeout(1500)
        page.screenshot(path=Path(folder) / f"{request.node.name}.png")
    page.close()


def sees(page, text):
    playwright.expect(page.get_by_text(text, exact=True).first).to_be_visible(timeout=1000 * SEEN_S)


def test_scalars_page_has_both_runs_and_groups_that_begin_with_the_result(visit):
    page = visit("scalars")
    for name in ACCURACY:
        sees(page, name)
    for card in ("eval/accuracy", "eval/loss", "train/loss", "train/grad_norm"):
        sees(page, card)
    headings = [text.split()[0] for text in page.locator("tf-category-paginated-view button.heading").all_inner_texts()]
    assert headings == ["eval", "train", "train_by_epoch", "train_by_rank", "usage"]


@pytest.mark.slow
def test_hparams_page_has_both_runs_with_settings_and_final_metrics(visit):
    page = visit("hparams")
    for column in ("ranks", "recipe", "test accuracy"):
        sees(page, column)
    for name, accuracy in ACCURACY.items():
        sees(page, name)
        sees(page, f"{accuracy:.5f}")


@pytest.mark.slow
def test_images_page_has_the_picture_of_both_runs(visit):
    page = visit("images")
    for name in ACCURACY:
        sees(page, name)
    pictures = page.locator("tf-image-loader img")
    playwright.expect(pictures).to_have_count(len(ACCURACY))
    for number in range(len(ACCURACY)):
        page.wait_for_function("image => image.naturalWidth > 100", arg=pictures.nth(number).element_handle())


def test_make_board_is_for_this_machine_only():
    words = ["make", "--dry-run", "board", "PORT=7007"]
    done = subprocess.run(words, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert "tensorboard --logdir runs --host 127.0.0.1 --port 7007" in done.stdout
