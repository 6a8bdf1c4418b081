from hvdtrain.tracking.placement import read_plan


def test_a_run_without_hvdlaunch_has_no_plan():
    assert read_plan(None) is None  # tests/unit/start/test_render.py reads plans
