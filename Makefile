# make train | train-bert | test | test-changed | test-slow | test-long | test-mpi5 | test-cluster | image | test-image | test-peers |
#      lint | design | docs | docs-check | board | bench | book-table | gpu-day | soak | wheels | lock | setup | clean
SHELL := /bin/bash
# Without a GPU, or with several, 2 ranks train; a rank needs a GPU for itself.
GPUS = $(shell nvidia-smi -L 2>/dev/null | grep -c ^GPU)
NP ?= $(if $(filter 1,$(GPUS)),1,2)
SEEDS ?= 1
PORT ?= 6006
ARGS ?= --data digits --model efficientnet_tiny --epochs 40 --batch-size-per-rank 32
# MPI=5 takes Open MPI 5 instead of the system's or Open MPI 4, TORCH=2.11 torch 2.11.0, TORCH=2.14 torch 2.14.1, CUDA=12.6 a
# torch for V100 and P100, TORCH=here the torch of this machine's Python: environments of their own.
export MPI CUDA TORCH GPU
# Every run and test starts many processes: each module is compiled once, also where the environment says otherwise.
unexport PYTHONDONTWRITEBYTECODE
VENV := source .venv$(MPI:%=-mpi%)$(CUDA:%=-cuda%)$(TORCH:%=-%)/bin/activate &&
LAUNCH = hvdlaunch run -np $(NP) --

.PHONY: docs docs-check setup setup-test setup-dev train train-bert test test-changed test-slow test-long test-mpi5 test-cluster image test-image test-peers lint design board bench book-table gpu-kit gpu-rehearse gpu-day soak wheels lock clean

setup:
	@scripts/setup.sh

# One after the other, also with --jobs: they share the environment.
setup-test: setup
	@scripts/setup.sh test
setup-dev: setup-test
	@scripts/setup.sh dev

train: setup
	$(VENV) $(LAUNCH) python -m hvdtrain.effnet $(ARGS)

# Diagnoses to their chapters by a small BERT: 2 ranks on 2 cores, no download. ARGS="--task mlm" for masked words.
train-bert: setup
	$(VENV) $(LAUNCH) python -m hvdtrain.bert $(ARGS)

# Three tests at a time on 2 cores: they wait as much as they compute.
SIDE_BY_SIDE := -n 3 --dist worksteal

test: setup-test
	$(VENV) pytest $(SIDE_BY_SIDE)

# Unit tests of the rooms that a change touches and of those above them. SINCE=main takes all since the branch left main.
test-changed: setup-test
	$(VENV) tests=$$(python scripts/changed_tests.py $(SINCE)) && pytest $(SIDE_BY_SIDE) $$tests

test-slow: setup-dev
	$(VENV) pytest $(SIDE_BY_SIDE) -m 'slow and not long and not cluster'

# Those that CI has no time for; each says why. With Horovod's CUDA kernels, also where there is no GPU. Then the tests of
# make test and test-slow, but for the site's, on the pair of torch and torchvision that CI does not run:
# docs/reference/tested.md has the last run.
OTHER_TORCH = 2.11
test-long: export GPU = 1
test-long: setup-dev
	$(VENV) pytest -m long
	TORCH=$(OTHER_TORCH) scripts/setup.sh test
	source .venv$(MPI:%=-mpi%)-$(OTHER_TORCH)/bin/activate && pytest $(SIDE_BY_SIDE) -m 'not long and not cluster and not image and not peers' --ignore tests/browser/test_site.py

# Faults, restarts and split models of make test, on Open MPI 5. Horovod's own horovodrun does not start its ranks.
MPI5_TESTS := comm faults faults_around groups mesh preemption resume sharded stages supervise tensor tune
test-mpi5:
	@MPI=5 scripts/setup.sh test
	source .venv-mpi5/bin/activate && pytest $(SIDE_BY_SIDE) $(MPI5_TESTS:%=tests/mpi/test_%.py)

# Hosts of network namespaces: as root, with sshd, iproute2 and iptables; skips with the reason elsewhere.
test-cluster: setup-test
	$(VENV) pytest $(SIDE_BY_SIDE) -m 'cluster and not long' tests/cluster

# With docker or buildah: scripts/build_image.sh lists the variables.
image:
	scripts/build_image.sh

# On a Debian made by debootstrap: as root, with debootstrap, buildah and what test-cluster needs.
test-image: setup-test
	scripts/debian_image.sh hvdtrain-debian
	GPU=0 BUILDER=buildah BASE_IMAGE=localhost/hvdtrain-debian IMAGE=hvdtrain-test scripts/build_image.sh
	$(VENV) IMAGE=hvdtrain-test pytest -m image

# Programs of other libraries under hvdlaunch and under torchrun or mpirun, and mpi4py's suite: a quarter of an hour, in .venv-peers.
# Its tables are in build/bench/: cp build/bench/peers*.json bench/results/ && make docs puts them into docs/reference/peers.md.
test-peers:
	@scripts/setup.sh peers
	source .venv-peers/bin/activate && pytest -m peers tests/peers

lint: setup-dev design
	$(VENV) ruff check . && ruff format --check . && python scripts/check_loads.py hvdtrain launch scripts bench && mypy && \
		hadolint Dockerfile

# Who imports whom, how many lines there are, and what the centre of hvdtrain must not know: a few seconds.
design: setup-dev
	$(VENV) lint-imports && python scripts/count_lines.py && pytest -q tests/unit/test_design.py

# The site, in build/docs: pages and pictures that are generated first, and every link must lead somewhere.
SITE := sphinx-build --quiet --fail-on-warning --keep-going docs build/docs
docs: setup-dev
	$(VENV) python -m scripts.docs && $(SITE) && echo "build/docs/index.html"

# What is generated is up to date, and marked commands in docs/ and the examples of docstrings print what is written there; changes nothing.
docs-check: setup-dev
	$(VENV) python -m scripts.docs check && $(SITE)

# The runs in runs/, compared in a browser of this machine.
board: setup
	$(VENV) tensorboard --logdir runs --host 127.0.0.1 --port $(PORT)

# The short ones, one after the other on a machine that does nothing else; each leaves its table in build/bench/.
SHORT := "step --models efficientnet_b0:16 mlp:64 --rounds 2" overhead "input --rounds 5" \
	"all-reduce --rounds 3" "start --rounds 3" memory
bench: setup
	$(VENV) for case in $(SHORT); do python bench/run.py $$case || exit; done

# The table of the reference (docs/explanation/accuracy.md) for whoever has the GPUs: every size up to theirs, both recipes, time and
# accuracy. The same command goes on where it was cut off. Without GPUs give NP and ARGS; SWEEP is for hvdlaunch sweep.
book-table: NP = $(GPUS)
book-table: ARGS = --data cifar10 --model efficientnet_b7 --pretrained hub --epochs 25 --batch-size-per-rank 256
book-table: setup
	$(if $(filter 0,$(NP)),$(error no GPU here: give NP=2 ARGS="--data digits ..." to try it))
	$(VENV) for recipe in book scaled; do \
		echo "recipe $$recipe" && hvdlaunch sweep -np $$(seq -s, $(NP)) --seeds $(SEEDS) $(SWEEP) -- \
			python -m hvdtrain.effnet --recipe $$recipe $(ARGS) || exit; \
	done

# What is claimed of GPUs, in stages of under ten minutes that go on where they were cut off. DAY="step b7" names some.
gpu-day: setup
	$(VENV) python bench/run.py gpu-day $(if $(DAY),--stages $(DAY))

# The kit for a quarter of an hour on a machine with one GPU and no network, in .gpu/ (PYTHON= names its Python 3.12), and its
# rehearsal on CPUs. There: bash .gpu/quarter.sh .gpu OUTPUT 8.5; here then: python -m bench.gpu_results OUTPUT
gpu-kit:
	scripts/gpu_kit.sh

gpu-rehearse: gpu-kit
	rm -rf build/gpu-rehearsal
	WORK='$(CURDIR)/build/gpu-rehearsal' PATH="$${XDG_CACHE_HOME:-$$HOME/.cache}/hvdtrain/gpu-kit/py312/bin:$$PATH" \
		scripts/without_network.sh bash .gpu/quarter.sh .gpu build/gpu-rehearsal/output 30 --rehearse

# 1,000 faults of nine kinds in runs with --restarts: nothing is lost or left. An hour; the same command continues.
soak: setup
	$(VENV) python bench/run.py soak

# hvdtrain, hvdlaunch, Horovod and the MPI it was built for, in dist/, for another environment with the same Python and torch,
# which PYTHON=, TORCH= or CUDA=, and MPI= name. There: pip install dist/*.whl
wheels: export GPU := $(or $(GPU),1)
wheels:
	@scripts/setup.sh wheels && ls dist/*.whl

# Needs uv. The locks hold hashes and no index address.
UV := uv pip compile --universal --python-version 3.11 --generate-hashes --quiet --no-header --upgrade
lock:
	for pair in torch2.11 torch2.14 cuda12.6; do \
		override="--override requirements/$$pair.in"; \
		$(UV) pyproject.toml --group horovod $$override --output-file requirements/run-$$pair.lock && \
		$(UV) --group dev $$override --constraint requirements/run-$$pair.lock --output-file requirements/dev-$$pair.lock && \
		$(UV) --group test $$override --constraint requirements/dev-$$pair.lock --output-file requirements/test-$$pair.lock || exit; \
	done
	$(UV) --group peers --override requirements/torch2.11.in --constraint requirements/dev-torch2.11.lock --output-file requirements/peers-torch2.11.lock
	$(subst 3.11,3.12,$(UV)) pyproject.toml requirements/gpu.in --group horovod --output-file requirements/gpu.lock
	$(UV) --group mpi --output-file requirements/mpi.lock
	$(UV) --group mpi5 --output-file requirements/mpi5.lock
	$(UV) --group nvcc --output-file requirements/nvcc-13.0.lock

clean:
	rm -rf .venv build dist *.egg-info packaging/hvdlaunch/{build,*.egg-info}
