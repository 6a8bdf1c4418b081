"""scripts/build_image.sh, started for real, with stand-ins for docker and buildah that record how they are started."""

from pathlib import Path

import pytest

from tests.setup.commands import run

SCRIPT = Path(__file__).parents[2] / "scripts" / "build_image.sh"


@pytest.fixture
def build(tmp_path):
    """Build with these builders on PATH and these variables: (exit status, words of the builder, stderr)."""

    def start(*builders: str, engine: bool = True, **env: str):
        for name in builders:
            answer = "" if engine else 'if [ "$1" = info ]; then exit 1; fi\n'
            (tmp_path / name).write_text(
                f'#!/bin/sh\n{answer}[ "$1" = info ] || printf "%s\\n" {name} "$@" >{tmp_path}/words\n'
            )
            (tmp_path / name).chmod(0o755)
        for tool in ("bash", "dirname", "git", "env"):
            (tmp_path / tool).symlink_to(Path("/usr/bin") / tool)
        done = run([SCRIPT], env={"PATH": str(tmp_path), "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), **env})
        words = tmp_path / "words"
        return done.returncode, words.read_text().splitlines() if words.exists() else [], done.stderr

    return start


@pytest.mark.parametrize(
    ("engine", "starts_with"),
    [(True, ["docker", "build", "--tag", "hvdtrain"]), (False, ["buildah", "build", "--isolation", "chroot"])],
)
def test_docker_builds_where_its_engine_answers_and_buildah_elsewhere(build, engine, starts_with):
    status, words, _ = build("docker", "buildah", engine=engine)
    assert (status, words[:4]) == (0, starts_with)
    assert not {"--secret", "BASE_IMAGE"} & set(words)


@pytest.mark.parametrize(
    ("env", "asked"),
    [
        ({"BASE_IMAGE": "debian:12"}, {"BASE_IMAGE=debian:12", "RUN_IMAGE=debian:12"}),
        ({"BASE_IMAGE": "cuda", "RUN_IMAGE": "debian:12"}, {"BASE_IMAGE=cuda", "RUN_IMAGE=debian:12"}),
        ({"CUDA": "12.6"}, {"CUDA=12.6", "BASE_IMAGE=nvidia/cuda:12.6.3-devel-ubuntu24.04", "RUN_IMAGE=ubuntu:24.04"}),
        ({"TARGET": "efa"}, {"--target", "efa"}),
    ],
)
def test_variables_choose_the_base_and_the_target(build, env, asked):
    assert asked <= set(build("docker", **env)[1])


def test_pips_configuration_and_certificates_are_lent_as_secrets(build, tmp_path):
    (tmp_path / "pip.conf").write_text("[global]\ntimeout = 60\n")
    words = build("docker", PIP_CERT="/etc/own.pem")[1]
    assert {f"id=pip.conf,src={tmp_path}/pip.conf", "id=certificates,src=/etc/own.pem"} <= set(words)


@pytest.mark.parametrize(
    ("builders", "env", "fact"), [([], {}, "install"), (["docker"], {"CUDA": "11"}, "CUDA=12.6 is for P100 and V100")]
)
def test_what_is_wrong_is_said_in_one_line(build, builders, env, fact):
    status, words, said = build(*builders, **env)
    assert (status, words) == (2, [])
    [line] = said.splitlines()
    assert fact in line
