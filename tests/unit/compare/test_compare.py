import base64
import csv
import io
import os
import re
from contextlib import redirect_stdout
from functools import cache

import pytest
from PIL import Image

from hvdtrain.compare import __main__ as compare
from hvdtrain.compare import drawings, groups
from hvdtrain.compare import runs as runfolder
from hvdtrain.compare.tables import shorten
from hvdtrain.safety.exits import BadInput

from .runfolders import make_run


def runs_of(folder):
    return runfolder.read_runs(runfolder.find_folders([folder]), [])


def rows(text):
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def two_recipes(folder, *, apart=0.02):
    for seed, noise in enumerate((0.0, 0.002, -0.002)):
        make_run(folder / f"a-seed{seed}", seed=seed, accuracy=0.96 + noise, speed=1000 + seed)
        make_run(folder / f"b-seed{seed}", seed=seed, accuracy=0.96 + apart + noise, config={"lr": 0.5})
    return folder


@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    """The comparison of two recipes that are so far apart, made once: its folder, and what a terminal shows."""

    @cache
    def compared(apart=0.02):
        folder = tmp_path_factory.mktemp("recipes")
        with redirect_stdout(io.StringIO()) as shown:
            compare.main([str(two_recipes(folder / "runs", apart=apart)), "--out", str(folder / "out")])
        return folder / "out", shown.getvalue()

    return compared


@pytest.fixture
def as_svg_only(monkeypatch):
    """The picture is drawn for the page, and not once more as PNG."""
    monkeypatch.setattr(drawings, "to_png", lambda _: b"")


def compared(folder, out):
    """The table with all columns, and what stands below it."""
    compare.main([str(folder), "--out", str(out)])
    return (out / "table.md").read_text()


def test_runs_that_differ_in_the_seed_are_one_row(recipes):
    first, second = rows((recipes()[0] / "table.md").read_text())
    assert (first["run"], first["n"], first["seeds"], first["lr"]) == ("a-seed*", "3", "0, 1, 2", "not set")
    assert (first["accuracy %"], second["accuracy %"]) == ("96.00 ± 0.20", "98.00 ± 0.20")
    assert (first["steps"], first["skipped steps"], first["exit reason"]) == ("48", "0", "finished")
    assert first["peak MiB"] == "612 ± 0"
    assert list(first)[3] == "lr"  # what differs comes before what came out
    assert not {"model", "np", "commit"} & set(first)


@pytest.mark.usefixtures("as_svg_only")
def test_a_terminal_gets_ten_columns_at_most_with_the_chosen_settings_first(tmp_path, capsys):
    for place, name in enumerate(("a", "b")):
        known = {f"option_{number}": place for number in range(9)}
        known |= {"lr": (0.1234567891, 0.2)[place], "data_dir": f"/data/{'long-' * 9}{name}"}
        make_run(tmp_path / name, np=1 + place, accuracy=0.9 + place / 20, config=known)
    text = compared(tmp_path, tmp_path / "out")
    assert len(rows(text)[0]) == 25
    output = capsys.readouterr().out
    first, second = rows(output)
    assert list(first) == [
        "run",
        "np",
        "lr",
        "option_0",
        "option_1",
        "option_2",
        "time s",
        "images/s",
        "accuracy %",
        "loss",
    ]
    assert (first["lr"], second["lr"]) == ("0.1235", "0.2")
    assert output.splitlines()[-1] == (
        f"Accuracy against a: b +5.00 points (too few runs to tell); all columns, curves and 95 % intervals: "
        f"{tmp_path}/out/report.html"
    )
    page = (tmp_path / "out" / "report.html").read_text()
    assert "0.1234567891" in page
    assert "option_<wbr>8" in page


def test_settings_that_follow_from_others_are_shown_if_no_others_differ(tmp_path):
    for steps in (1, 2):
        make_run(tmp_path / str(steps), config={"derived": {"global_batch": 64, "steps_per_epoch": steps}})
    run_groups = groups.group_runs(runs_of(tmp_path))
    assert groups.chosen_settings(run_groups) == ["steps_per_epoch"]
    assert groups.labels(run_groups) == ["1: steps_per_epoch 1", "2: steps_per_epoch 2"]


@pytest.mark.parametrize(
    ("texts", "short"),
    [
        (["0.006241319444444445", "64", "3.10"], ["0.006241", "64", "3.10"]),
        (["0.12345678", "0.12345679"], ["0.12345678", "0.12345679"]),
        (["a" * 40, "b" * 40], ["a" * 16 + "…", "b" * 16 + "…"]),
        (
            ["/a/long/way/to/x", "/a/long/way/to/it/x", "/a/long/way/to/it/y"],
            ["/a/long/way/to/x", "…long/way/to/it/x", "…long/way/to/it/y"],
        ),
        (["a" * 40 + "b" * 40, "a" * 41 + "b" * 40], ["a" * 40 + "b" * 40, "a" * 41 + "b" * 40]),
    ],
)
def test_long_settings_are_shortened_as_far_as_they_stay_different(texts, short):
    assert shorten(texts) == short


@pytest.mark.parametrize(("apart", "judged"), [(0.02, "outside"), (0.001, "inside")])
def test_one_sentence_says_what_is_more_than_the_spread(recipes, apart, judged):
    sentence = recipes(apart)[1].splitlines()[-1]
    assert sentence.startswith(
        f"Accuracy against a-seed*: b-seed* +{100 * apart:.2f} points ({judged} the spread over seeds); "
    )


@pytest.mark.usefixtures("as_svg_only")
def test_what_moves_the_cursor_is_escaped(tmp_path, capsys):
    make_run(tmp_path / "a\x1b[2J", config={"data": "b\x1b[2J"})
    make_run(tmp_path / "c")
    (tmp_path / "c" / "result.json").unlink()
    compare.main([str(tmp_path), "--out", str(tmp_path / "out")])
    output = capsys.readouterr()
    assert "\x1b" not in output.out + output.err
    assert "a\\x1b[2J" in output.out


@pytest.mark.parametrize(
    ("apart", "words"),
    [
        (0.02, "+2.00 points: outside the spread over seeds (95 % interval +1.55 to +2.45)"),
        (0.001, "+0.10 points: inside the spread over seeds, no difference shown (95 % interval -0.35 to +0.55)"),
    ],
)
def test_a_difference_is_compared_with_the_spread(recipes, apart, words):
    text = (recipes(apart)[0] / "table.md").read_text()
    assert f"- accuracy of b-seed* against a-seed*: {words}" in text
    assert "Welch" in text


@pytest.mark.usefixtures("as_svg_only")
def test_nothing_is_claimed_of_a_single_run(tmp_path):
    make_run(tmp_path / "a", accuracy=0.5)
    make_run(tmp_path / "b", accuracy=0.9, config={"lr": 0.5})
    text = compared(tmp_path, tmp_path / "out")
    assert "+40.00 points: the spread over seeds is not known (n = 1)" in text


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"config": {"lr": 0.5}}, "lr (not set, 0.5)"),
        ({"environment": {"torch": "2.12.0"}}, "torch (2.11.0, 2.12.0)"),
        ({"environment": {"commit": "def5678"}}, "commit (abc1234, def5678)"),
        ({"environment": {"code_sha256": "1f0c"}}, "code_sha256 (9b31, 1f0c)"),
        ({"environment": {"nccl_settings": {"NCCL_ALGO": "Ring"}}}, "NCCL_ALGO (-, Ring)"),
        ({"hosts": ["one", "two"]}, "hosts (1, 2)"),
        ({"device": "cuda:0"}, "device (cpu, cuda:0)"),
        ({"result": {"exit_reason": "interrupted"}}, "how they ended (finished, interrupted)"),
    ],
)
def test_what_is_no_average_is_refused_with_the_reason(tmp_path, change, why):
    make_run(tmp_path / "a", seed=0)
    make_run(tmp_path / "b", seed=1, **change)
    run_groups = groups.group_runs(runs_of(tmp_path))
    assert len(run_groups) == 2
    assert groups.separation_reason(run_groups) == f"Not averaged over each other: 2 groups, which differ in {why}."


def test_one_average_needs_no_refusal(tmp_path):
    make_run(tmp_path / "x" / "a", seed=0, environment={"host": "one"}, hosts=["one"])
    make_run(tmp_path / "y" / "b", seed=1, environment={"host": "two"}, hosts=["two"])
    (group,) = groups.group_runs(runs_of(tmp_path))
    assert groups.separation_reason([group]) is None
    assert groups.remarks([group]) == ["a and 1 more: on different hosts (one; two): times include their difference."]


def test_a_group_is_named_by_a_pattern_that_matches_no_other_run(tmp_path):
    for seed in (0, 1):
        make_run(tmp_path / f"x-seed{seed}", seed=seed)
        make_run(tmp_path / f"x-seed{seed}-lr", seed=seed, config={"lr": 0.5})
    assert [group.name for group in groups.group_runs(runs_of(tmp_path))] == [
        "x-seed0 and 1 more",
        "x-seed0-lr and 1 more",
    ]


def test_a_seed_run_twice_is_no_spread_over_seeds(tmp_path):
    for name in ("a1", "a2"):
        make_run(tmp_path / name, seed=3)
    (line,) = groups.remarks(groups.group_runs(runs_of(tmp_path)))
    assert line == "a*: 2 runs, but seed 3 more than once: not the spread over seeds."


def test_runs_that_did_not_finish_stay_alone_and_are_compared_with_nothing(tmp_path):
    make_run(tmp_path / "a", seed=0)
    for seed in (1, 2):
        make_run(tmp_path / f"b{seed}", seed=seed, result={"exit_reason": "interrupted"})
        (make_run(tmp_path / f"c{seed}", seed=seed) / "result.json").unlink()
    run_groups = groups.group_runs(runs_of(tmp_path))
    assert [group.name for group in run_groups] == ["a", "b1", "b2", "c1", "c2"]
    assert groups.verdicts(run_groups) == []


@pytest.mark.usefixtures("as_svg_only")
def test_what_is_missing_is_a_dash_and_a_line_and_the_rest_is_shown(tmp_path, capsys):
    make_run(tmp_path / "a", result={"eval_loss": None, "skipped_steps": None, "memory": None})
    (make_run(tmp_path / "b", seed=1) / "result.json").unlink()
    (make_run(tmp_path / "c", seed=2) / "config.json").write_text("{")
    text = compared(tmp_path, tmp_path / "out")
    a, b, c = rows(text)
    assert (a["accuracy %"], a["loss"], a["skipped steps"], a["peak MiB"]) == ("97.00", "-", "-", "-")
    assert (b["accuracy %"], b["time s"], b["exit reason"]) == ("-", "-", "-")
    assert c["accuracy %"] == "97.00"
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"hvdtrain: warning: {tmp_path}/b: no result.json")
    assert lines[1].startswith(f"hvdtrain: warning: {tmp_path}/c/config.json: cannot be read")
    assert "settings that are unknown (c)" in text


@pytest.mark.parametrize(("energy_wh", "cells"), [(12.0, ["12.0"]), (None, [])])
def test_energy_is_a_column_if_it_was_measured(tmp_path, energy_wh, cells):
    make_run(tmp_path / "a", result={"energy_wh": energy_wh})
    columns = compare.table(groups.group_runs(runs_of(tmp_path)))
    assert [text for column in columns if column.title == "energy Wh" for text in column.texts] == cells


@pytest.mark.usefixtures("as_svg_only")
def test_odd_runs_are_left_out_in_one_line_each_and_the_others_are_compared(tmp_path, capsys):
    nested = "[" * 200_000 + "]" * 200_000
    odd = [
        ("result.json", f'{{"np": {"9" * 400}}}', "an integer of 400 digits"),
        ("metrics.jsonl", f'{{"step": {"9" * 5000}}}', "an integer of 5000 digits"),
        ("metrics.jsonl", nested, "nested too deeply"),
        ("config.json", f'{{"data": {nested}}}', "nested too deeply"),
        ("result.json", '{"hosts": 5}', "'hosts' is not a list"),
        ("placement.json", '{"ranks": 5}', "'ranks' is not a list"),
        ("config.json", '{"data": "\\ud800"}', "half of a surrogate pair, which is not text"),
        ("result.json", '{"exit_reason": "\\ud800"}', "half of a surrogate pair, which is not text"),
    ]
    for number, (file, content, _) in enumerate(odd):
        (make_run(tmp_path / f"odd{number}") / file).write_text(content)
    make_run(tmp_path / os.fsdecode(b"odd\xff"))
    make_run(tmp_path / "a", seed=0)
    make_run(tmp_path / "b", seed=1)
    compare.main([str(tmp_path), "--out", str(tmp_path / "out")])
    output = capsys.readouterr()
    assert [row["run"] for row in rows(output.out)] == ["a and 1 more"]
    lines = [f"odd{number}/{file}: {problem}" for number, (file, _, problem) in enumerate(odd)]
    lines.append(r"odd\xff: its path is not valid UTF-8")
    assert output.err.splitlines() == [f"hvdtrain: warning: {tmp_path}/{line}; skipping this run" for line in lines]


def test_odd_runs_alone_are_one_line(tmp_path):
    make_run(tmp_path / os.fsdecode(b"odd\xff"))
    with pytest.raises(BadInput, match=r"no run can be compared: .* its path is not valid UTF-8"):
        compare.main([str(tmp_path), "--out", str(tmp_path / "out")])


def test_names_are_drawn_as_they_are(tmp_path):
    names = [r"a$\frac$", "_b", "c"]
    for name in names:
        make_run(tmp_path / name, config={"model": name})
    figure = drawings.draw_curves(groups.group_runs(runs_of(tmp_path)))
    drawings.to_svg(figure)
    entries = [text.get_text() for text in figure.legends[0].get_texts()]
    assert sorted(entries) == sorted(f"{name}: model {name}" for name in names)


@pytest.mark.usefixtures("as_svg_only")
def test_a_vertical_bar_in_a_setting_does_not_break_the_table(tmp_path, capsys):
    make_run(tmp_path / "a")
    make_run(tmp_path / "b", config={"data_dir": "x|y"})
    compare.main([str(tmp_path), "--out", str(tmp_path / "out")])
    assert "| x\\|y" in capsys.readouterr().out


def test_csv_holds_plain_numbers(recipes):
    with (recipes()[0] / "table.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert float(first["accuracy_percent"]) == pytest.approx(96)
    assert float(first["accuracy_percent_deviation"]) == pytest.approx(0.2)
    assert (second["lr"], second["n"], second["steps"]) == ("0.5", "3", "48.0")


def test_page_needs_nothing_but_itself(tmp_path):
    make_run(tmp_path / "<script>alert(1)</script>".replace("/", "_"), config={"lr": "<b>"})
    make_run(tmp_path / "b")
    compare.main([str(tmp_path), "--out", str(tmp_path / "out")])
    page = (tmp_path / "out" / "report.html").read_text()
    assert "<script" not in page
    assert "<b>" not in page
    (picture,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert b"<svg" in base64.b64decode(picture)
    with Image.open(tmp_path / "out" / "curves.png") as drawn:
        assert drawn.size == (1560, 832)
    assert not list((tmp_path / "out").glob("*.part"))


@pytest.mark.usefixtures("as_svg_only")
def test_settings_that_fill_the_page_have_a_table_of_their_own(tmp_path):
    make_run(tmp_path / "a")
    many = dict.fromkeys("uvwxyz", 1)
    make_run(tmp_path / "b", config=many)
    compare.main([str(tmp_path), "--out", str(tmp_path / "out")])
    page = (tmp_path / "out" / "report.html").read_text()
    heads = re.findall("<thead>.*?</thead>", page)
    assert len(heads) == 2
    assert [">u<" in head for head in heads] == [True, False]
    assert [">loss<" in head for head in heads] == [False, True]


def test_curves_are_drawn_over_steps_epochs_and_seconds(tmp_path):
    two_recipes(tmp_path)
    figure = drawings.draw_curves(groups.group_runs(runs_of(tmp_path)))
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


def test_runs_without_metrics_say_so_in_the_picture(tmp_path):
    (make_run(tmp_path / "a") / "metrics.jsonl").unlink()
    figure = drawings.draw_curves(groups.group_runs(runs_of(tmp_path)))
    assert figure.texts[0].get_text().startswith("no learning curves")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ([], "nothing to compare"),
        (["gone"], "gone: not a folder"),
        (["--sweep", "gone.json"], "gone.json: cannot be read"),
        (["a", "--sweep", "b"], "not both"),
        (["--sweep", "b", "--out", "c"], "--out: only for run folders"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option. See --help"),
    ],
)
def test_bad_input_is_one_line(words, line):
    with pytest.raises(BadInput, match=line):
        compare.main(words)


@pytest.mark.usefixtures("as_svg_only")
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    make_run(tmp_path / "a")
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="another --out"):
        compare.main([str(tmp_path), "--out", str(tmp_path / "file" / "out")])


@pytest.mark.usefixtures("as_svg_only")
def test_runs_of_text_are_told_in_samples_and_perplexity(tmp_path, capsys):
    of_text = {"train_images_per_s": None, "train_samples_per_s": 250.0, "eval_perplexity": 72.04, "eval_f1": 0.8124}
    make_run(tmp_path / "runs" / "a", result=of_text, config={"data": "icd10"})
    make_run(tmp_path / "runs" / "b")
    compare.main([str(tmp_path / "runs"), "--out", str(tmp_path / "out")])
    text, image = rows(capsys.readouterr().out)
    assert (text["samples/s"], text["perplexity"], text["F1"], text["images/s"]) == ("250", "72.0", "0.812", "-")
    assert (image["samples/s"], image["perplexity"], image["images/s"]) == ("-", "-", "1000")
