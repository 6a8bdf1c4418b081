"""The image, from inside: what README and compose.yaml promise, and what must not be in it."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

from tests.cluster.namespaces import Holder
from tests.image.containers import SUBNET, Container, Image, new_volume

PROJECT = Path(__file__).parents[2]
HOME = Path("home/hvdtrain")
TRAIN = shlex.split("python -m hvdtrain.effnet --data digits --model efficientnet_tiny")
MakeContainer = Callable[..., Container]


def result_in(runs: Path, of: str = "effnet") -> dict:
    (path,) = runs.glob(f"{of}/*/result.json")
    return json.loads(path.read_text())


def test_the_main_job_trains_on_two_ranks(container: MakeContainer) -> None:
    one = container()
    words = ["hvdlaunch", "run", "-np", "2", "--", *TRAIN, "--epochs", "5", "--batch-size-per-rank", "32"]
    status, said = one.run(words, timeout_s=280)
    assert status == 0, said
    result = result_in(one.written / HOME / "runs")
    assert (result["np"], result["exit_reason"]) == (2, "finished")
    assert result["eval_accuracy"] > 0.8  # chance is 0.1


def test_two_ranks_learn_diagnoses_offline(container: MakeContainer) -> None:
    one = container()
    words = "hvdlaunch run -np 2 -- python -m hvdtrain.bert --max-steps 300 --export model"
    status, said = one.run(shlex.split(words), timeout_s=280)
    assert status == 0, said
    result = result_in(one.written / HOME / "runs", of="bert")
    assert (result["np"], result["steps"], result["exit_reason"]) == (2, 300, "finished")
    assert result["eval_accuracy"] > 0.5  # the largest chapter is 0.26
    assert (one.written / HOME / "model" / "model.safetensors").exists()


def test_compose_trains_over_ssh(container: MakeContainer, image: Image, tmp_path: Path) -> None:
    """compose.yaml, as Docker Compose would bring it up: `first` when `second` is healthy."""
    compose = yaml.safe_load((PROJECT / "compose.yaml").read_text())
    hub = Holder("ip link add name bridge0 type bridge\nip link set bridge0 up", tmp_path / "hub.log", processes=False)
    hub.wait()
    try:
        services = compose["services"]
        board = services.pop("board")
        addresses = {name: f"{SUBNET}.{n}" for n, name in enumerate(services, 2)}
        names = "".join(f"{address} {name}\n" for name, address in addresses.items())
        volumes: dict[str, Path] = {}
        there = {}
        for name, service in services.items():
            assert service["hostname"] == name
            mounts = dict(one.split(":") for one in service["volumes"])
            for volume, inside in mounts.items():
                if volume not in volumes:
                    volumes[volume] = new_volume(image, inside, tmp_path / "volumes" / volume)
            inside = {path: volumes[volume] for volume, path in mounts.items()}
            there[name] = container(name, hosts=names, volumes=inside)
            there[name].cable(hub, addresses[name])
        first, second = services["first"], services["second"]
        there["second"].start(shlex.split(second["command"]))
        kind, *question = second["healthcheck"]["test"]
        assert kind == "CMD"
        there["second"].wait_until(question)
        status, said = there["first"].run(shlex.split(first["command"]), timeout_s=280)
        assert status == 0, said + there["second"].printed()
        result = result_in(volumes["runs"])
        assert (result["np"], result["hosts"], result["exit_reason"]) == (2, ["first", "second"], "finished")

        # The board shows the run.
        words = shlex.split(board["command"])
        (volume, inside) = board["volumes"][0].split(":")
        shows = container("board", volumes={inside: volumes[volume]})
        shows.start(words)
        shows.wait_until(["bash", "-c", "</dev/tcp/127.0.0.1/6006"])
        fetch = "import urllib.request as u; print(u.urlopen('http://127.0.0.1:6006/data/runs').read().decode())"
        (run,) = (path.name for path in (volumes["runs"] / "effnet").iterdir())
        assert run in shows.run(["python", "-c", fetch])[1]

        # The door: no password, no other key, and no other host in the place of the known one.
        ssh = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "second"]
        assert there["first"].run([*ssh, "hostname"], entrypoint=False) == (0, "second\n")
        status, said = there["first"].run([*ssh[:-1], "-o", "PubkeyAuthentication=no", "second", "true"])
        assert (status, "Permission denied (publickey)" in said) == (255, True), said
        (volumes["keys"] / "authorized_keys").write_text("")
        assert "Permission denied (publickey)" in there["first"].run([*ssh, "true"])[1]
        known = volumes["keys"] / "known_hosts"
        known.write_text(known.read_text().replace("second", "third").replace(addresses["second"], "10.74.0.99"))
        assert "Host key verification failed" in there["first"].run([*ssh, "true"])[1]
    finally:
        hub.end([])


def test_a_container_makes_its_host_key_and_takes_the_port_asked_for(container: MakeContainer, image: Image) -> None:
    public = []
    for name in ("one", "two"):
        here = container(name, hosts=f"127.0.0.1 {name}\n")
        here.start(["sshd"], env=["SSH_PORT=2222"])
        here.wait_until(["bash", "-c", "</dev/tcp/127.0.0.1/2222"])
        ssh = ["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", name, "python", "--version"]
        status, said = here.run(ssh, entrypoint=False)  # PATH is the image's, the port that of ~/.ssh/config
        assert (status, said.startswith("Python 3.")) == (0, True), said
        public.append((here.written / HOME / "host_key.pub").read_text())
    assert public[0] != public[1]
    assert not list((image.root / "etc/ssh").glob("ssh_host_*"))
    assert not list((image.root / HOME / ".ssh").iterdir())


def test_nothing_of_the_build_stays(image: Image) -> None:
    root = image.root
    assert shutil.which("nvcc", path=f"{root}/usr/local/cuda/bin:{root}/usr/bin") is None
    for folder in ("var/lib/apt/lists", "var/cache/apt/archives", "root/.cache", str(HOME / ".cache"), "build"):
        files = [path for path in (root / folder).rglob("*") if path.is_file() and path.name != "lock"]
        assert files == [], folder
    assert not (root / "etc/pip.conf").exists()
    lent = os.environ.get("PIP_CERT")
    bundle = root / "etc/ssl/certs/ca-certificates.crt"
    assert lent is None or bundle.read_bytes() != Path(lent).read_bytes()
    assert image.config["User"] not in ("", "0", "root")


def test_apptainer_ranks_inside_mpirun_outside(image: Image, tmp_path: Path) -> None:
    """A stand-in enters the image's files as `apptainer exec` does: in a user namespace of each rank's own, with
    this /dev, /proc, /sys, /tmp and environment."""
    definition = (PROJECT / "apptainer.def").read_text()
    environment = definition.split("%environment\n")[1].split("%runscript")[0]
    assert "PREFIX" in environment
    path = next(one for one in image.config["Env"] if one.startswith("PATH="))
    commit = next(one for one in image.config["Env"] if one.startswith("HVDTRAIN_COMMIT="))
    mounts = "; ".join(f"mount --rbind /{name} {image.root}/{name}" for name in ("dev", "proc", "sys", "tmp"))
    stand_in = tmp_path / "bin/apptainer"
    stand_in.parent.mkdir()
    stand_in.write_text(
        f'#!/bin/bash\nwhile [ "$1" != {image.root} ]; do shift; done; shift\n{environment}\nexport {path} {commit}\n'
        f"exec unshare --user --map-root-user --mount bash -c '{mounts}; exec chroot {image.root} "
        'env --chdir="$PWD" "$@"\' bash "$@"\n'
    )
    stand_in.chmod(0o755)
    outside = Path(sys.prefix) / "bin"
    words = [outside / "hvdlaunch", "run", "-np", "2", "--apptainer", image.root, "--", *TRAIN]
    done = subprocess.run(
        [*map(str, words), "--epochs", "1"],
        env={**os.environ, "PATH": f"{stand_in.parent}:{outside}:{os.environ['PATH']}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert result_in(tmp_path / "runs")["np"] == 2
    (recorded,) = (tmp_path / "runs").glob("effnet/*/environment.json")
    assert json.loads(recorded.read_text())["commit"] == commit.partition("=")[2]
