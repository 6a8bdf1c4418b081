"""Dockerfile, compose.yaml and apptainer.def as text: what must agree with the rest of the project."""

import re
import shlex
from pathlib import Path

import yaml

PROJECT = Path(__file__).parents[2]
DOCKERFILE = (PROJECT / "Dockerfile").read_text()
COPIED = [
    source
    for words in (shlex.split(line) for line in DOCKERFILE.splitlines() if line.startswith("COPY "))
    if not any(word.startswith("--from=") for word in words)
    for source in [word for word in words[1:-1] if not word.startswith("--")]
]


def test_each_toolkit_is_that_of_its_torch() -> None:
    """Horovod is compiled by the toolkit's CUDA and runs on the libraries of torch's."""
    (toolkit,) = re.findall(r"^ARG BASE_IMAGE=nvidia/cuda:([\d.]+)-devel-", DOCKERFILE, re.MULTILINE)
    (pair,) = re.findall(r"run-\S+:-(\S+)\}\.lock", DOCKERFILE)
    lock = (PROJECT / f"requirements/run-{pair}.lock").read_text()
    (locked,) = re.findall(r"^cuda-toolkit\S*==(\d+\.\d+\.\d+)", lock, re.MULTILINE)
    assert toolkit == locked
    script = (PROJECT / "scripts/build_image.sh").read_text()
    (toolkit,) = re.findall(r"nvidia/cuda:(\d+\.\d+)\.\d+-devel-ubuntu", script)
    locked = (PROJECT / "requirements/run-cuda12.6.lock").read_text()
    assert re.search(rf"^nvidia-cuda-runtime-cu12=={re.escape(toolkit)}\.", locked, re.MULTILINE)


def test_both_stages_have_the_same_distribution() -> None:
    """The environment is copied from one to the other and runs on the Python of its distribution."""
    (base,) = re.findall(r"^ARG BASE_IMAGE=\S+-ubuntu([\d.]+)$", DOCKERFILE, re.MULTILINE)
    assert f"ARG RUN_IMAGE=ubuntu:{base}\n" in DOCKERFILE


def test_what_is_copied_exists_and_is_sent_to_the_builder() -> None:
    sent = (PROJECT / ".dockerignore").read_text().splitlines()
    assert [name for name in COPIED if not (PROJECT / name).exists() or f"!{Path(name).parts[0]}" not in sent] == []


def test_compose_starts_the_image_that_make_builds_and_shows_its_board_on_its_own_machine_alone() -> None:
    services = yaml.safe_load((PROJECT / "compose.yaml").read_text())["services"]
    assert {service["image"] for service in services.values()} == {"hvdtrain"}
    assert services["first"]["depends_on"] == {"second": {"condition": "service_healthy"}}
    hosts = ",".join(f"{name}:1" for name, service in services.items() if "hostname" in service)
    assert f" -H {hosts} " in services["first"]["command"]
    board = services["board"]
    assert board["profiles"] == ["board"]  # not with the training
    assert all(port.startswith("127.0.0.1:") for port in board["ports"])
    assert board["volumes"][0] in services["first"]["volumes"]


def test_apptainer_takes_the_files_of_the_image() -> None:
    definition = (PROJECT / "apptainer.def").read_text()
    (prefix,) = set(re.findall(r"_?PREFIX=(\S+)", definition))
    assert f"COPY --from=build {prefix} {prefix}\n" in DOCKERFILE
