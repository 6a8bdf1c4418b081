from pathlib import Path

import pytest

from hvdtrain.loop.feed.split_names import SplitName, choose_splits, ends_with_split, split_name, splits_among
from tests.refusals import refused, require_facts


@pytest.mark.parametrize(
    ("role", "others", "names"),
    [
        ("train", (), "train Train TRAIN training trainSet trainingset train_data images-train train.0-of-3 trainval"),
        ("test", (), "test Testing TestSet test_images holdout test-00001-of-00002"),
        ("validation", (), "val valid Validation dev dev_matched eval evaluation ValData devset"),
        ("train", ("seg",), "seg_train seg-training SegTrain trainSeg"),
        ("validation", ("ilsvrc", "2012"), "ILSVRC2012_img_val"),
        ("test", ("猫",), "猫_test"),
        ("validation", ("mismatched",), "dev_mismatched"),
        (None, (), "trainer invalid contest trains devices train_test cat 7 _"),
    ],
)
def test_names_are_matched_as_people_write_them(role, others, names):
    expected = None if role is None else SplitName(role=role, others=others)
    assert {name: split_name(name) for name in names.split()} == dict.fromkeys(names.split(), expected)


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        ("test_tube training_shoes cat", ""),
        ("seg_train seg_test seg_pred", "seg_test seg_train"),
        ("train_lines test", "test"),
        ("my_train rest", "my_train"),
        ("train2 rest", "train2"),
    ],
)
def test_a_name_with_other_words_needs_a_partner_or_a_splits_word_at_its_end(names, splits):
    assert splits_among(names.split(), ends_with_split) == splits.split()


@pytest.mark.parametrize(
    ("names", "train", "tests"),
    [
        ("train eval", "train", "eval"),
        ("train val test", "train", "test val"),
        ("train", "train", ""),
        ("a_train a_test test_labels", "a_train", "a_test"),
        ("train test_a", "train", "test_a"),
        ("train test dev valid", "train", "test"),  # which of the two is meant does not matter
        ("train dev_matched dev_mismatched test_matched", "train", "test_matched dev_matched"),
    ],
)
def test_the_test_comes_before_the_validation_and_a_pair_before_others(names, train, tests):
    chosen = choose_splits(names.split(), [], Path("here"), "file")
    assert chosen == ([train], [[name] for name in tests.split()])


def test_only_files_are_cut_into_numbered_parts():
    names = ["train-0-of-2", "train-1-of-2", "test-0-of-1"]
    assert choose_splits(names, [], Path("here"), "file")[0] == ["train-0-of-2", "train-1-of-2"]
    parts = ["train-00000-of-00002", "train_fold_1_of_5"]
    require_facts(refused(lambda: choose_splits(parts[:1], [], Path("here"), "file")), f"'{parts[0]}': 1 of 2 files")
    assert choose_splits(parts[1:], [], Path("here"), "file")[0] == parts[1:]
    assert "'train-0-of-2' is the split, or 'train-1-of-2'" in refused(
        lambda: choose_splits(names, [], Path(), "folder")
    )


@pytest.mark.parametrize(
    ("names", "others", "facts"),
    [
        (
            "test",
            "cat dog",
            "--data-dir here: ambiguous names: either 'test' for testing ... or 'test' as a class like 'cat', 'dog'.",
        ),
        ("test val", "", "either 'test', 'val' for testing, while no class is called train ... Call ... train"),
        ("train train2 test", "", "either 'train' is the split, or 'train2' is. Merge"),
        ("Train train test", "", "either 'Train' is the split, or 'train' is."),
        ("train dev valid", "", "either 'dev' is the split, or 'valid' is."),
        ("train test_a test_b", "", "either 'test_a' is the split, or 'test_b' is."),
        ("test", "a b c d e", "like 'a', 'b', 'c' and 2 more"),
    ],
)
def test_names_with_two_readings_are_refused_with_both(names, others, facts):
    require_facts(refused(lambda: choose_splits(names.split(), others.split(), Path("here"), "class")), facts)
