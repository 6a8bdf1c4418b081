import pytest
from PIL import Image

from hvdtrain.compare import __main__ as compare
from hvdtrain.compare import drawings, groups
from hvdtrain.compare import runs as runfolder
from hvdtrain.compare.study import read_study

from .runfolders import make_run, three_sizes, two_recipes


def curves_of(folder):
    run_groups = groups.group_runs(runfolder.read_runs(runfolder.find_folders([folder]), []))
    return drawings.draw_curves(run_groups, groups.chosen_settings(run_groups))


def test_curves_of_all_runs_are_drawn_over_epochs_and_seconds(tmp_path):
    figure = curves_of(two_recipes(tmp_path))
    assert [axes.get_xlabel() for axes in figure.axes] == ["epochs", "seconds"]
    assert figure.axes[0].get_ylabel() == "test accuracy, %"
    for axes, last in zip(figure.axes, (4, 5.76), strict=True):
        assert len(axes.lines) == 6
        assert axes.lines[0].get_xdata()[-1] == last
        assert axes.lines[0].get_ydata() == pytest.approx([66, 76, 86, 96])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "a-seed0 and 2 more: lr not set",
        "b-seed0 and 2 more: lr 0.5",
    ]


def test_names_are_drawn_as_they_are(tmp_path):
    names = [r"a$\frac$", "_b", "c"]  # the first would be wrong as a formula
    for name in names:
        make_run(tmp_path / name, config={"model": name})
    entries = [text.get_text() for text in curves_of(tmp_path).legends[0].get_texts()]
    assert sorted(entries) == sorted(f"{name}: model {name}" for name in names)
    compare.main([str(tmp_path), "--out", str(tmp_path / "out")])
    with Image.open(tmp_path / "out" / "curves.png") as drawn:
        assert drawn.width == 1560
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"curves.png", "table.csv", "table.md"}


def test_the_picture_of_a_study_has_its_best_metric_and_marks_what_is_advised_and_what_has_no_result(tmp_path):
    file = three_sizes(tmp_path, r"a$\frac$", metric="iou", min_efficiency=80)
    for seed in (0, 1):
        (tmp_path / f"runs/np4-seed{seed}/result.json").unlink()
    figure = drawings.draw_scaling(read_study(file, []))
    speed_up, _, best = figure.axes
    assert [text.get_text() for text in speed_up.get_xticklabels()] == ["1\n", "2\nadvised", "4\nno result"]
    assert best.get_title(loc="left") == "test iou"
    assert list(best.lines[0].get_ydata()) == pytest.approx([0.9705, 0.9685])
    drawings.to_png(figure)
