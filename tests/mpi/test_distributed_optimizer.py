"""The optimizer of a run inside Horovod's DistributedOptimizer: it is what it was, and steps as it did."""

from hvdtrain.recipe.optim import BUILD


def test_an_optimizer_keeps_all_that_it_is_and_takes_the_same_steps(run_program):
    """fp16 halves its loss scale at the first step, which is skipped."""
    for rank in run_program("mpirun", 2, "wrapped.py"):
        for name in BUILD:
            for precision, scale in (("fp32", 1.0), ("fp16", 512.0)):
                assert rank[f"{name} {precision}"] == {
                    "horovods": True,
                    "alike": True,
                    "scale": [scale, scale],
                    "weights": 0,
                    "state": 0,
                    "calls": 6 if name in ("sgd", "adam", "adamw") else 5,  # what is not fused skips by itself
                }, (name, precision)
        for groups in (1, 2):  # a parameter that one rank does not use holds up none
            assert rank[f"groups {groups}"] == 0
