"""How gradients are best sent: fusion threshold, cycle time, groups and reducer, on whole steps of two models.

    python bench/fusion.py --rounds 5                          2 ranks; half an hour
    python bench/fusion.py --rounds 5 --models mlp --only bucket

Every round starts each variant once, in turns; a ratio is the time of a step against `horovod, 128 MiB, 1 ms` (Horovod
as it is) in the same round: below 1 is faster. Horovod's autotune runs beside them: its steps are timed after so many
more that it may have made up its mind.
"""

from variants import Variant, arguments, compare

FIRST = "horovod, 128 MiB, 1 ms"
THRESHOLDS_MB = (0, 8, 32, 64)
BUCKETS_MB = (1, 4, 8, 25, 64, 128)
CYCLES_MS = (0.5, 5, 10)
GROUPS = (1, 4)
AUTOTUNE = {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "5"}
AUTOTUNE_STEPS = 120  # Horovod takes 20 samples


def variants() -> dict[str, Variant]:
    """By name, the first one as it is without options."""
    horovod, bucket = "--set=reducer=horovod", "--set=reducer=bucket"
    found: dict[str, Variant] = {FIRST: ([horovod], {})}
    for size in THRESHOLDS_MB:
        found[f"horovod, {size} MiB"] = ([horovod, f"--set=fusion_threshold_mb={size}"], {})
    for cycle in CYCLES_MS:
        found[f"horovod, {cycle} ms"] = ([horovod, f"--set=cycle_time_ms={cycle}"], {})
    for groups in GROUPS:
        found[f"horovod, groups {groups}"] = ([horovod, f"--set=fusion_groups={groups}"], {})
    for size in BUCKETS_MB:
        found[f"bucket, {size} MiB"] = ([bucket, f"--set=fusion_threshold_mb={size}"], {})
    for cycle in CYCLES_MS:
        found[f"bucket, {cycle} ms"] = ([bucket, f"--set=cycle_time_ms={cycle}"], {})
    found["horovod, autotune"] = ([horovod, f"--warmup-steps={AUTOTUNE_STEPS}"], AUTOTUNE)
    return found


def main() -> None:
    chosen = arguments(__doc__ or "").parse_args()
    question = f"Which way of sending gradients takes the shortest steps? {chosen.ranks} ranks, one thread each."
    compare(variants(), chosen, name="fusion", question=question)


if __name__ == "__main__":
    main()
