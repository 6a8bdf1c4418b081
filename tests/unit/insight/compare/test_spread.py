import pytest

from hvdtrain.insight.compare.spread import compare_means, compute_mean


@pytest.mark.parametrize(
    ("here", "there", "interval", "kind"),
    [
        ([96.5, 96.1, 97.0], [95.9, 96.8, 96.2, 96.6], (-0.7447703, 1.061437), "inside"),
        ([96.5, 96.1, 97.0], [93.9, 93.1], (0.8241307, 5.242536), "outside"),
        ([1.0, 9.0], [20.0, 21.0], (-63.19504, 32.19504), "inside"),  # two runs show little
    ],
)
def test_interval_is_that_of_welchs_test(here, there, interval, kind):
    """As scipy.stats.ttest_ind(here, there, equal_var=False).confidence_interval(0.95) has it."""
    found = compare_means(compute_mean(here), compute_mean(there))
    assert (found.change - found.half_width, found.change + found.half_width) == pytest.approx(interval)
    assert found.kind == kind
