"""What a launcher pod of Kubeflow has: a default hostfile and the operator's variables for Open MPI."""

import json
from pathlib import Path

from tests.cluster.test_launch import ENV, HVDLAUNCH, NOTE, MakeCluster

# ompiEnvVars of pkg/controller/mpi_job_controller.go in kubeflow/mpi-operator
OPERATORS = {
    "K_MPI_JOB_ROLE": "launcher",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_set_default_slots": "2",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
}


def test_the_hostfile_of_the_pod_is_the_default(cluster: MakeCluster, tmp_path: Path) -> None:
    hosts = cluster()
    (tmp_path / "hostfile").write_text("h1 slots=2\nh2 slots=2\n")
    env = {**ENV, **OPERATORS, "OMPI_MCA_orte_default_hostfile": str(tmp_path / "hostfile")}
    words = ["run", "-np", "3", "--", "python", NOTE, tmp_path]
    done = hosts.run("outside", [HVDLAUNCH, *words], env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    notes = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank-*.json"))]
    assert [(note["host"], note["local_rank"]) for note in notes] == [("h1", 0), ("h1", 1), ("h2", 0)]
