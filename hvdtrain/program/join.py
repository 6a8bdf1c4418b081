"""Joins the ranks of a run: each rank parses its command line, then all connect and agree that it is valid."""

import ctypes.util
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TypeVar

from hvdtrain.core.replica.parts import require_parts, split_replicas
from hvdtrain.insight.tracking.environment import code_hash, package_versions, read_plan
from hvdtrain.parallel.sync.comm import group_ranks
from hvdtrain.program.settings import Settings
from hvdtrain.ranks.agree import agree, require_equal
from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.connect import connect
from hvdtrain.ranks.libraries import library_versions, sees_gpus
from hvdtrain.settings.capabilities import Capability, conflict
from hvdtrain.settings.command_line import option
from hvdtrain.settings.group import Incomplete, uses
from hvdtrain.settings.safety import exits, life
from hvdtrain.settings.safety.exits import BadInput, launched_rank
from hvdtrain.settings.safety.torch_version import require_tested

S = TypeVar("S", bound=Settings)


def with_reducer(config: S) -> tuple[S, str | None]:
    """Set the reducer if none is given: Horovod's on GPUs, else buckets.

    The note names the settings that require buckets even on GPUs. GPUs without NCCL cannot train on several ranks: see
    ranks.device.
    """
    if config.reducer is not None:
        return config, None
    if not sees_gpus():
        return replace(config, reducer="bucket"), None
    reason = conflict(uses(replace(config, reducer="horovod")))
    if reason is None:
        return replace(config, reducer="horovod"), None
    return replace(config, reducer="bucket"), f"--reducer bucket is used, since {reason}"


def with_horovods_threshold(config: S, environment: Mapping[str, str]) -> tuple[S, str | None]:
    """Take the threshold from Horovod's environment if the command line has none; return the settings and a warning.

    The warning names variables that have no effect. Raise BadInput if the threshold is not a number of bytes.
    """
    tuned, threshold = "HOROVOD_AUTOTUNE", "HOROVOD_FUSION_THRESHOLD"  # horovodrun sets them, too
    names, beside = [tuned], "--reducer bucket"
    if config.deterministic:
        names, beside = [threshold, tuned], "--deterministic"
    elif Capability.GRADIENTS in config.compression_on("cpu").takes:
        names, beside = [threshold, tuned], f"--compression {config.compression}"
    elif config.reducer == "horovod":
        names = []
    unused = [name for name in names if environment.get(name, "0") != "0"]
    warning = f"{', '.join(unused)}: no effect with {beside}. Unset {' and '.join(unused)}." if unused else None
    threshold_text = environment.get(threshold, "")
    if not threshold_text or threshold in names or config.fusion_threshold_mb is not None:
        return config, warning
    if re.fullmatch(r"\d+(\.\d*)?", threshold_text, re.ASCII) is None:
        raise BadInput(f"{threshold}={threshold_text!r}: not a number of bytes. Correct it in the environment.")
    return replace(config, fusion_threshold_mb=float(threshold_text) / 2**20), warning


def join_ranks(parse: Callable[[Sequence[str]], S], fallback: S) -> tuple[Comm, S]:
    """Connect the ranks; return them with settings that all have parsed. `fallback` is used to connect after an error.

    Errors that can be found without torch are raised before its import, which takes seconds.
    """
    note, untested, warning = None, None, None
    try:
        untested = require_tested()
        config = parse(sys.argv[1:])
        if config.dry_run:
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same result with and without a GPU
        config, note = with_reducer(config)
        (config, warning), bad = with_horovods_threshold(config, os.environ), None
    except BadInput as error:
        config, bad = fallback, error  # the ranks still connect, to agree to exit
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by torch.use_deterministic_algorithms
    if warning:
        os.environ.pop("HOROVOD_AUTOTUNE", None)
    comm = connect(
        fusion_threshold_mb=config.sent_at_once_mb if config.reducer == "horovod" else 0.0,  # buckets are not copied
        cycle_time_ms=config.cycle_time_ms,
        timeline=config.profile == "timeline",
        hang_timeout_s=config.hang_timeout_s,
    )

    placed = read_plan(os.environ.get("HVDLAUNCH_PLAN"))

    def require_good() -> None:
        if isinstance(bad, Incomplete):
            require_parts(*bad.settings.parts, ranks=comm.size, placement=placed, other_error=bad)
        elif bad is not None:
            raise bad

    agree(comm, require_good)
    if launched_rank() == 0:
        for line in filter(None, (untested, note)):
            exits.print_message("note", line)
        if warning is not None:
            exits.print_message("warning", warning)
    settings = {option(name): str(value) for name, value in asdict(config).items()}
    of_packages = {f"the version of {name}": value for name, value in package_versions().items()}
    require_equal(comm, {**settings, **of_packages, "the code of hvdtrain (its SHA-256)": code_hash()})
    option_of_parts, parts = config.parts
    require_parts(option_of_parts, parts, ranks=comm.size, placement=placed)
    if config.dry_run and comm.size > 1:
        raise BadInput(
            f"--dry-run counts one rank's step, not {comm.size}. Start one process, and pass the rank's share as "
            "--batch-size-per-rank."
        )
    comm = split_replicas(comm, parts, option_of_parts)
    if config.sync.startswith("two-level") or config.rounds is not None:
        comm = agree(comm, lambda: group_ranks(comm, config.sync_group_size))

    life.doing("loading torch")
    # torch 2.14 imports cuda.pathfinder, which would start ldconfig for this name: a process after MPI_Init.
    find_library = ctypes.util.find_library
    ctypes.util.find_library = lambda name: "libdl.so.2" if name == "dl" else find_library(name)
    from hvdtrain.ranks.device import set_arithmetic, share_cores  # imports torch

    share_cores(comm)
    set_arithmetic(deterministic=config.deterministic, tf32=config.precision != "fp32")
    require_equal(comm, {f"the version of {name}": value for name, value in library_versions().items()})
    return comm, config
