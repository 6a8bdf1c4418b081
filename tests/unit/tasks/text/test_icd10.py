import sys
from collections import Counter

from hvdtrain.tasks.text import icd10


def test_diagnoses_have_chapters_and_no_disease_is_in_both_splits():
    codes = {True: set(), False: set()}
    for code, _ in icd10._diagnoses():
        codes[icd10._is_for_test(code)].add(code[:5])
    assert not codes[True] & codes[False]
    train, test = list(icd10.train()), list(icd10.test())
    assert (len(train), len(test)) == (53769, 5681)
    labels = Counter(row.label for row in (*train, *test))
    assert set(labels) == {str(chapter) for chapter in range(1, 23)}
    assert "simple_icd_10_cm" not in sys.modules  # its package is read and not imported
    assert 0.25 < max(labels.values()) / sum(labels.values()) < 0.27
