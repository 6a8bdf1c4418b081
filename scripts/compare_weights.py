"""Train with another checkout and with this one, and compare the weights bit by bit.

    python scripts/compare_weights.py ../before                  # every case
    python scripts/compare_weights.py ../before effnet-flat      # these cases

Each case is trained twice in fp32 with --deterministic, by mpirun on two ranks: with the code in the given
folder and with this checkout's code, both with the Python that runs this script. Exits with status 1 if the weights of
a case differ.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parents[1]
EFFNET = ["hvdtrain.effnet", "--data", "digits", "--model", "efficientnet_tiny", "--epochs", "2"]
BERT = ["hvdtrain.bert", "--max-steps", "12", "--global-batch-size", "32", "--max-tokens", "32"]
LOCAL = ["--sync", "local:2/1"]
STAGES = ["--accumulate-steps", "4", "--stages"]

CASES: dict[str, tuple[int, list[str], dict[str, str]]] = {
    "effnet-flat": (2, EFFNET, {}),
    "effnet-sync-bn": (2, [*EFFNET, "--sync-bn"], {}),
    "effnet-stages": (2, [*EFFNET, *STAGES, "0,4"], {}),
    "effnet-local": (2, [*EFFNET, *LOCAL], {}),
    "effnet-find-nan": (2, [*EFFNET, "--find-nan"], {"HVDTRAIN_FAULT": "nan@rank1:step3"}),
    "effnet-powersgd": (2, [*EFFNET, "--compression", "powersgd:2"], {}),
    "effnet-recompute": (2, [*EFFNET, "--recompute"], {}),
    "effnet-horovod": (2, [*EFFNET, "--reducer", "horovod"], {}),
    "bert-flat": (2, BERT, {}),
    "bert-stages": (2, [*BERT, *STAGES, "0,2"], {}),
    "bert-tensor": (2, [*BERT, "--tensor", "2"], {}),
    "bert-local": (2, [*BERT, *LOCAL], {}),
    "bert-find-nan": (2, [*BERT, "--find-nan"], {"HVDTRAIN_FAULT": "nan@rank1:step3"}),
}


def trained_weights(checkout: Path, case: str) -> str:
    """Return the SHA-256 of the weights that the code of a checkout trains."""
    ranks, words, environment = CASES[case]
    launcher = ["mpirun", "-np", str(ranks), "--oversubscribe"]
    with tempfile.TemporaryDirectory() as folder:
        run = ["--deterministic", "--run", "one", "--runs-dir", folder]
        environment = {**os.environ, **environment, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        if os.geteuid() == 0:
            environment |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        done = subprocess.run(
            [*launcher, sys.executable, "-m", *words, *run],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        result = next(Path(folder).glob("*/one/result.json"), None)
        if result is None or json.loads(result.read_text())["exit_reason"] != "finished":
            sys.exit(f"{case} in {checkout}: status {done.returncode}\n{done.stdout}\n{done.stderr}")
        facts = [json.loads(file.read_text()) for file in sorted(result.parent.glob("ranks/rank-*.json"))]
        hashes = {str(one["weights_sha256"]) for one in facts if "weights_sha256" in one}
        if len(hashes) != 1:
            sys.exit(f"{case} in {checkout}: ranks with different weights")
        return hashes.pop()


def main() -> None:
    """Compare the named cases, or all."""
    other, *cases = sys.argv[1:]
    differing = []
    for case in cases or CASES:
        before, now = trained_weights(Path(other).resolve(), case), trained_weights(HERE, case)
        print(f"{case:18} {before[:16]} {now[:16]} {'equal' if before == now else 'DIFFERENT'}", flush=True)
        differing += [case] * (before != now)
    sys.exit(f"different weights: {', '.join(differing)}" if differing else 0)


if __name__ == "__main__":
    main()
