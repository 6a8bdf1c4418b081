import os
import sys

import pytest

from hvdtrain.program import join
from hvdtrain.program.join import join_ranks, with_horovods_threshold, with_reducer
from hvdtrain.ranks import device
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.tasks.vision import settings as vision_settings
from tests.ranks import Rank
from tests.refusals import refused, require_facts

SIZE, TUNED = "HOROVOD_FUSION_THRESHOLD", "HOROVOD_AUTOTUNE"


@pytest.mark.parametrize("fact", ["the version of torch", "the version of mpi", "--fusion-threshold-mb"])
def test_ranks_with_other_versions_or_thresholds_are_refused(monkeypatch, fact):
    def with_other(said):
        host, facts = said
        return [said, [host, {**facts, fact: "another"} if fact in (facts or ()) else facts]]

    monkeypatch.setattr(os, "environ", {**os.environ, SIZE: "8388608"})
    monkeypatch.setattr(sys, "argv", ["it"])
    monkeypatch.setattr(join, "connect", lambda **_: Rank(0, 2, answers=with_other))
    message = refused(lambda: join_ranks(vision_settings.parse, vision_settings.scaled()))
    require_facts(message, f"{fact}: rank 0 on ... rank 1 on ... 'another' ... same command")


@pytest.mark.parametrize(
    ("words", "gpus", "reducer", "beside"),
    [
        ("", False, "bucket", None),
        ("", True, "horovod", None),
        ("--reducer bucket", True, "bucket", None),
        ("--sync two-level/1 --compression fp16 --deterministic", True, "horovod", None),
        ("--compression powersgd:2", True, "bucket", "--compression powersgd:2"),
    ],
)
def test_horovods_optimizer_sums_on_gpus_where_the_other_settings_let_it(monkeypatch, words, gpus, reducer, beside):
    monkeypatch.setattr(join, "sees_gpus", lambda: gpus)
    settings, note = with_reducer(vision_settings.parse(words.split()))
    assert settings.reducer == reducer
    assert (note is None) == (beside is None)
    if beside is not None:
        assert note.startswith("--reducer bucket ")
        assert beside in note


@pytest.mark.parametrize(
    ("words", "environment", "bucket_mb", "warning"),
    [
        ("", {}, 8.0, None),
        ("", {SIZE: str(64 * 2**20)}, 64.0, None),
        ("", {SIZE: "524288.0"}, 0.5, None),  # as horovodrun's configuration file may lead to
        ("--fusion-threshold-mb 16", {SIZE: str(64 * 2**20)}, 16.0, None),
        ("--reducer horovod", {SIZE: str(64 * 2**20), TUNED: "1"}, 64.0, None),
        ("", {SIZE: str(64 * 2**20), TUNED: "1"}, 64.0, f"{TUNED}: no effect with --reducer bucket. Unset "),
        ("--deterministic", {SIZE: "9", TUNED: "1"}, 0.0, f"{SIZE}, {TUNED}: no effect with --deterministic. Unset "),
        ("--compression powersgd:2", {SIZE: "9"}, 8.0, f"{SIZE}: no effect with --compression powersgd:2. Unset "),
    ],
)
def test_horovods_environment_is_obeyed_or_named(words, environment, bucket_mb, warning):
    settings, said = with_horovods_threshold(vision_settings.parse(words.split()), environment)
    assert settings.sent_at_once_mb == bucket_mb
    assert (said is None) == (warning is None)
    assert (said or "").startswith(warning or "")


@pytest.mark.parametrize("size", ["64MB", "-1"])
def test_a_threshold_of_the_environment_is_a_number_of_bytes(size):
    settings = vision_settings.scaled()
    assert refused(lambda: with_horovods_threshold(settings, {SIZE: size})) == (
        f"{SIZE}={size!r}: not a number of bytes. Correct it in the environment."
    )


@pytest.mark.parametrize("given", ["8388608", None])
def test_a_rank_has_the_threshold_of_its_launcher(monkeypatch, capsys, given):
    environment = {TUNED: "1", **({} if given is None else {SIZE: given})}
    monkeypatch.setattr(join, "sees_gpus", lambda: False)
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(sys, "argv", ["it"])
    comm, settings = join_ranks(vision_settings.parse, vision_settings.scaled())
    assert isinstance(comm, SerialComm)
    assert settings.fusion_threshold_mb == (None if given is None else 8.0)
    assert environment[SIZE] == "0"  # Horovod's own: a bucket is not copied once more
    assert TUNED not in environment
    assert capsys.readouterr().err.count(f"hvdtrain: warning: {TUNED}: no effect with --reducer bucket") == 1


@pytest.mark.parametrize(("precision", "tf32"), [("tf32", True), ("fp32", False), ("bf16", True)])
def test_only_fp32_does_without_tf32(monkeypatch, precision, tf32):
    allowed = []
    monkeypatch.setattr(device, "set_arithmetic", lambda **how: allowed.append(how["tf32"]))
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(sys, "argv", ["it", "--precision", precision])
    join_ranks(vision_settings.parse, vision_settings.scaled())
    assert allowed == [tf32]
