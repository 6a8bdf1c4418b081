import pytest

from hvdtrain.insight.compare import drawings
from hvdtrain.insight.compare.study import read_study

from .runfolders import three_sizes


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
