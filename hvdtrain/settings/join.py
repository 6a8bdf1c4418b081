"""How ranks come to be one run: each reads its command line, they meet, and agree that all have read the same."""

import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TypeVar

from hvdtrain.elastic.comm import outliving, require_ulfm
from hvdtrain.ranks.agree import agreed, require_equal
from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.connect import connect
from hvdtrain.ranks.libraries import library_versions
from hvdtrain.safety.exits import BadInput, launched_rank
from hvdtrain.settings.command_line import Incomplete, option
from hvdtrain.settings.options import RunConfig, power_rank, rounds, sent_at_once_mb
from hvdtrain.stages.comm import in_parts, require_parts
from hvdtrain.sync.comm import in_groups
from hvdtrain.tracking.environment import code_hash, package_versions
from hvdtrain.tracking.placement import planned

Config = TypeVar("Config", bound=RunConfig)

GIVEN_THRESHOLD = "_HVDTRAIN_GIVEN_THRESHOLD"  # the launcher's, for newcomers: `connect` has set another


def with_horovods_threshold(config: Config, environment: Mapping[str, str]) -> tuple[Config, str | None]:
    """The settings, with the threshold of Horovod's environment if the command line has none, and a warning.

    The warning names the variables that have no effect. BadInput for a threshold that is not a number of bytes.
    """
    tuned, threshold = "HOROVOD_AUTOTUNE", "HOROVOD_FUSION_THRESHOLD"  # horovodrun sets them, too
    names, beside, remedy = [tuned], "--reducer bucket, whose buckets have one size", "Add --reducer horovod"
    if config.deterministic:
        names, beside, remedy = [threshold, tuned], "--deterministic, which sums each gradient alone", "Leave it out"
    elif power_rank(config.compression) is not None:
        names, beside = [threshold, tuned], f"--compression {config.compression}, which sends small matrices"
        remedy = "Leave it out"
    elif config.reducer == "horovod":
        names = []
    unused = [name for name in names if environment.get(name, "0") != "0"]
    unset = f"nset {' and '.join(unused)}."
    fix = f"U{unset}" if config.elastic else f"{remedy}, or u{unset}"  # --elastic refuses the other reducer
    warning = f"{', '.join(unused)}: no effect with {beside}. {fix}" if unused else None
    given = environment.get(GIVEN_THRESHOLD, environment.get(threshold, ""))
    if not given or threshold in names or config.fusion_threshold_mb is not None:
        return config, warning
    if re.fullmatch(r"\d+(\.\d*)?", given, re.ASCII) is None:
        raise BadInput(f"{threshold}={given!r}: not a number of bytes. Correct it in the environment.")
    return replace(config, fusion_threshold_mb=float(given) / 2**20), warning


def horovod_fusion_mb(config: RunConfig) -> float | None:
    """MiB that Horovod itself sends at once: not what buckets hold, of which it would take copies, several at once."""
    return 0.0 if config.reducer == "bucket" else sent_at_once_mb(config)


def join_ranks(parse: Callable[[Sequence[str]], Config], fallback: Config) -> tuple[Comm, Config]:
    """The ranks, and settings that all of them have read alike; `fallback` is for what they need before they meet.

    What is wrong without torch is refused without it: its import takes seconds.
    """
    warning: str | None = None
    try:
        (config, warning), bad = with_horovods_threshold(parse(sys.argv[1:]), os.environ), None
    except BadInput as error:
        config, bad = fallback, error  # the ranks still have to meet, to agree that they leave
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as torch.use_deterministic_algorithms asks for
    if warning:
        os.environ.pop("HOROVOD_AUTOTUNE", None)
    os.environ.setdefault(GIVEN_THRESHOLD, os.environ.get("HOROVOD_FUSION_THRESHOLD", ""))  # `connect` sets another
    comm = connect(
        fusion_threshold_mb=horovod_fusion_mb(config),
        cycle_time_ms=config.cycle_time_ms,
        timeline=config.timeline,
        hang_timeout_s=config.hang_timeout_s,
        grows=config.grow,
    )

    placed = planned(os.environ.get("HVDLAUNCH_PLAN"))

    def require_good() -> None:
        if isinstance(bad, Incomplete):
            require_parts(*bad.settings.parts, ranks=comm.size, placed=placed, besides=bad)
        elif bad is not None:
            raise bad

    agreed(comm, require_good)
    if warning and launched_rank() == 0:
        print(f"hvdtrain: warning: {warning}", file=sys.stderr, flush=True)
    settings = {option(name): str(value) for name, value in asdict(config).items()}
    of_packages = {f"the version of {name}": value for name, value in package_versions().items()}
    alike = {**settings, **of_packages, "the code of hvdtrain (its SHA-256)": code_hash()}
    require_equal(comm, alike)
    part, parts = config.parts
    require_parts(part, parts, ranks=comm.size, placed=placed)
    if config.sync == "two-level" or rounds(config) is not None:
        comm = agreed(comm, lambda: in_groups(comm, config.sync_group_size))
    if config.elastic:
        agreed(comm, lambda: require_ulfm(comm, os.environ, grows=config.grow))
    comm = in_parts(comm, parts, part)

    from hvdtrain.ranks.device import set_arithmetic, share_cores  # torch

    share_cores(comm)
    set_arithmetic(deterministic=config.deterministic, tf32=config.tf32)
    of_libraries = {f"the version of {name}": value for name, value in library_versions().items()}
    require_equal(comm, of_libraries)
    if config.elastic:
        comm = agreed(comm, lambda: outliving(comm, os.environ, {**alike, **of_libraries}))
    return comm, config
