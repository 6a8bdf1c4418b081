"""scripts/build_image.sh, started for real, with stand-ins for docker and buildah that record how they are started."""

import subprocess
from pathlib import Path

import pytest

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
        done = subprocess.run(
            [SCRIPT],
            env={"PATH": str(tmp_path), "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"), **env},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        words = tmp_path / "words"
        return done.returncode, words.read_text().splitlines() if words.exists() else [], done.stderr

    return start


def test_docker_builds_where_its_engine_answers(build):
    status, words, _ = build("docker", "buildah")
    assert (status, words[:4]) == (0, ["docker", "build", "--tag", "hvdtrain"])
    assert not {"--secret", "BASE_IMAGE"} & set(words)


def test_buildah_builds_where_no_engine_answers(build):
    status, words, _ = build("docker", "buildah", engine=False)
    assert (status, words[:4]) == (0, ["buildah", "build", "--isolation", "chroot"])


def test_the_image_is_on_the_base_that_it_is_built_on(build):
    assert "RUN_IMAGE=debian:12" in build("docker", BASE_IMAGE="debian:12")[1]


def test_another_image_to_run_on(build):
    words = build("docker", BASE_IMAGE="cuda", RUN_IMAGE="debian:12")[1]
    assert {"BASE_IMAGE=cuda", "RUN_IMAGE=debian:12"} <= set(words)


def test_cuda_12_6_has_a_base_of_its_own(build):
    words = build("docker", CUDA="12.6")[1]
    assert {"CUDA=12.6", "BASE_IMAGE=nvidia/cuda:12.6.3-devel-ubuntu24.04", "RUN_IMAGE=ubuntu:24.04"} <= set(words)


def test_another_cuda_is_refused(build):
    status, words, said = build("docker", CUDA="11")
    assert (status, words) == (2, [])
    assert "CUDA=12.6 is for P100 and V100" in said


def test_a_target(build):
    words = build("docker", TARGET="efa")[1]
    assert words[words.index("--target") + 1] == "efa"


def test_pips_configuration_and_certificates_are_lent_as_secrets(build, tmp_path):
    (tmp_path / "pip.conf").write_text("[global]\ntimeout = 60\n")
    words = build("docker", PIP_CERT="/etc/own.pem")[1]
    assert {f"id=pip.conf,src={tmp_path}/pip.conf", "id=certificates,src=/etc/own.pem"} <= set(words)


def test_without_a_builder_one_line_says_what_to_install(build):
    status, _, said = build()
    assert status == 2
    assert len(said.splitlines()) == 1
    assert "install" in said
