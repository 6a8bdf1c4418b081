from hvdtrain.tracking.placement import planned


def test_a_run_without_hvdlaunch_has_no_plan():
    assert planned(None) is None  # tests/unit/start/test_render.py reads plans
