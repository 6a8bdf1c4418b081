import pytest

from hvdtrain.compare import drawings, groups
from hvdtrain.compare import runs as runfolder
from hvdtrain.compare.study import read_study

from .runfolders import make_run, make_study, three_sizes, two_recipes


def curves_of(folder):
    runs = runfolder.read_runs(runfolder.find_folders([folder]), [])
    return drawings.draw_curves(groups.group_runs(runs))


def test_curves_are_drawn_over_steps_epochs_and_seconds(tmp_path):
    figure = curves_of(two_recipes(tmp_path))
    loss, *_, accuracy = figure.axes
    assert [axes.get_xlabel() for axes in figure.axes[3:]] == ["steps", "epochs", "seconds"]
    assert len(loss.lines) == 2 * (3 + 1)  # each run, and the mean
    mean = loss.lines[3]
    assert list(mean.get_xdata()) == [12, 24, 36, 48]
    assert list(mean.get_ydata()) == pytest.approx([1.9, 1.4, 0.9, 0.4])
    assert accuracy.lines[0].get_ydata()[-1] == pytest.approx(96)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "a-seed*: lr not set; mean of 3",
        "b-seed*: lr 0.5; mean of 3",
    ]


def test_names_are_drawn_as_they_are(tmp_path):
    names = [r"a$\frac$", "_b", "c"]
    for name in names:
        make_run(tmp_path / name, config={"model": name})
    entries = [text.get_text() for text in curves_of(tmp_path).legends[0].get_texts()]
    assert sorted(entries) == sorted(f"{name}: model {name}" for name in names)


def test_runs_without_metrics_say_so_in_the_picture(tmp_path):
    (make_run(tmp_path / "a") / "metrics.jsonl").unlink()
    assert curves_of(tmp_path).texts[0].get_text().startswith("no learning curves")


def test_the_picture_of_a_study_marks_what_is_advised_and_what_has_no_result(tmp_path):
    file = three_sizes(tmp_path, r"a$\frac$", min_efficiency=80)
    for seed in (0, 1):
        (tmp_path / f"runs/np4-seed{seed}/result.json").unlink()
    figure = drawings.draw_scaling(read_study(file, []))
    labels = [text.get_text() for text in figure.axes[0].get_xticklabels()]
    assert labels == ["1\n", "2\nadvised", "4\nno result"]
    drawings.to_png(figure)


def test_pictures_draw_the_best_metric_of_a_task(tmp_path):
    file = three_sizes(tmp_path, metric="iou", max_accuracy_loss=1)
    curves, scaling = curves_of(tmp_path / "runs"), drawings.draw_scaling(read_study(file, []))
    assert curves.axes[3].get_ylabel() == "test iou"
    assert curves.axes[3].lines[0].get_ydata()[-1] == pytest.approx(0.97)
    assert scaling.axes[2].get_title(loc="left") == "test iou"
    assert list(scaling.axes[2].lines[0].get_ydata()) == pytest.approx([0.9705, 0.9685, 0.9505])


def test_a_study_without_results_is_drawn(tmp_path):
    figure = drawings.draw_scaling(read_study(make_study(tmp_path / "s", [(1, 0, None, "no GPU")]), []))
    assert figure.texts[0].get_text() == "no size has a result yet"
