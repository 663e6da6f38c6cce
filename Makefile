# Each target sets up .venv by itself, again whenever pyproject.toml or constraints.txt changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help demo test test-all test-frameworks size histories mutants smoke bench bench-peers bench-plane bench-references bench-training convergence results chaos fuzz fuzz-nightly soak image test-deploy lint clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   train for real on this machine, once per strategy, and compare (2 minutes)"
	@echo "make test   lint, then every test that takes less than four seconds (10 minutes)"
	@echo "make test-all  the tests that take longer, and each property with five times the examples (40 minutes)"
	@echo "make test-frameworks  the examples that need other people's trainers, against those (5 minutes)"
	@echo "make size   how large the product is, and how many calls a sample takes on its way"
	@echo "make histories  record anew what comes of 300 runs"
	@echo "make mutants  plant bugs, and see that tests find each; ONLY says which"
	@echo "make smoke  install the wheels without torch, the client's alone too, and use them"
	@echo "make bench  how long planning takes and how good the plans are"
	@echo "make bench-peers  our plans beside those of other projects, on the same lengths (10 minutes)"
	@echo "make bench-plane  how fast samples move, beside raw sockets and peers (5 minutes)"
	@echo "make bench-references  payloads by reference beside inline (10 minutes)"
	@echo "make bench-training  train with each way to balance, packed alike, and compare (10 minutes)"
	@echo "make convergence  whether training through a window comes out as in order of arrival (15 minutes)"
	@echo "make results  measure what docs/ shows, and write it there (55 minutes of an idle machine)"
	@echo "make chaos  240 faults on real processes, and whether anything was lost (25 minutes)"
	@echo "make fuzz   100,000 inputs that no well-behaved peer would send (12 minutes)"
	@echo "make fuzz-nightly  1,000,000 of them, others each day (2 hours)"
	@echo "make soak   2,000,000 samples of 64 producers under backpressure, and what memory is held (9 minutes)"
	@echo "make image  the container image, by buildah, on Debian; IMAGE, BASE and IMAGE_FLAGS say otherwise"
	@echo "make test-deploy  what is in deploy/, by the tools that know it, as far as they are here"
	@echo "make lint   ruff and mypy"
	@echo "make clean  remove .venv, build and caches"

$(STAMP): pyproject.toml dispatcher/rollout_planner/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-e dispatcher/rollout_planner -e '.[dev]'
	touch $@

demo: $(STAMP)
	$(BIN)/dispatcher demo

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What measures time has the machine to itself, before all the others share it.
TOGETHER := --numprocesses auto --maxprocesses 8 --dist loadfile
test test-all: export PYTHONASYNCIODEBUG = 1
test: lint
	$(BIN)/pytest -m "alone and not slow"
	$(BIN)/pytest -m "not alone and not slow" $(TOGETHER)

# What `make test` leaves. Together they are all tests, each property with all of its examples.
test-all: export FULL_EXAMPLES = 1
test-all: $(STAMP)
	$(BIN)/pytest -m "alone and slow"
	$(BIN)/pytest -m "not alone and (slow or hypothesis)" $(TOGETHER)

# ONLY="hf" tests these environments and leaves the others. See tests/frameworks/run.py.
test-frameworks: $(STAMP)
	$(BIN)/python -m tests.frameworks.run $(ONLY)

size: $(STAMP)
	$(BIN)/python -m tests.size

# Read what `python -m tests.histories check` says first: it names what comes out otherwise.
histories: $(STAMP)
	$(BIN)/python -m tests.histories record

mutants: $(STAMP)
	$(BIN)/python -m tests.mutants --only "$(ONLY)"

# In environments of their own under build/smoke, made with PYTHON.
smoke: $(STAMP)
	$(BIN)/python -m tests.packaging.smoke --python $(PYTHON)

# These peers are only read from, so they come without what they depend on.
UNPACKED := build/bench/peers/.unpacked
$(UNPACKED): $(STAMP) tests/peers/versions.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-compile \
		--upgrade --target build/bench/peers -r tests/peers/versions.txt
	touch $@

bench: $(STAMP)
	$(BIN)/python -m tests.bench.planner --json build/bench/planner.json

# Peers that the package index lacks run if they are cloned into build/bench/sources: slime, miles,
# AReaL, RL, SkyRL, OpenRLHF, prime-rl.
bench-peers: $(UNPACKED)
	$(BIN)/python -m tests.peers --json build/bench/peers.json

# Peers run, so they come with what they depend on, in an environment of their own. torch first, in
# the version that is used here.
PEERS := build/bench/peers-plane
$(PEERS)/.installed: constraints.txt
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(PEERS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		TransferQueue==0.1.11 ray==2.60.0
	touch $@

bench-plane: $(STAMP) $(PEERS)/.installed
	$(BIN)/python -m tests.bench.plane --json build/bench/plane.json

bench-references: $(STAMP)
	$(BIN)/python -m tests.bench.inline_limit --json build/bench/inline-limit.json

bench-training: $(STAMP) $(UNPACKED)
	$(BIN)/python -m tests.bench.training --json build/bench/training.json

convergence: $(STAMP)
	$(BIN)/python -m tests.convergence --json build/convergence.json

# ONLY="planner plane" measures these and leaves the other results as they are.
results: $(STAMP) $(UNPACKED) $(PEERS)/.installed
	$(BIN)/python -m tests.results.measure $(ONLY)

chaos: $(STAMP)
	$(BIN)/python -m tests.chaos --out build/chaos.json

fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz

# SEED=2 draws others; a night's seed is the day, so that no two nights try the same.
fuzz-nightly: $(STAMP)
	$(BIN)/python -m tests.fuzz --inputs 1000000 --seed $(or $(SEED),$(shell date +%Y%m%d))

soak: $(STAMP)
	$(BIN)/python -m tests.soak --out build/soak.json

# BASE may be an image of one's own, where no registry is reached; IMAGE_FLAGS go to buildah as they
# are: "--isolation chroot --volume /etc/pip.conf:/etc/pip.conf:ro", say.
IMAGE ?= rollout-dispatcher
BASE ?= docker.io/library/debian:bookworm-slim
image:
	buildah build --format docker --layers --build-arg BASE=$(BASE) $(IMAGE_FLAGS) \
		-f deploy/docker/Dockerfile -t $(IMAGE) .

# A Slurm of one node runs where slurmctld, slurmd and munged are installed (root); the image is
# tried where DISPATCHER_IMAGE names it (root, buildah).
DEPLOY := build/deploy
$(DEPLOY)/.installed: tests/deploy/requirements.txt
	test -x $(DEPLOY)/bin/python || $(PYTHON) -m venv $(DEPLOY)
	$(DEPLOY)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

test-deploy: $(STAMP) $(DEPLOY)/.installed
	PATH="$(CURDIR)/$(DEPLOY)/bin:$$PATH" $(BIN)/pytest -rs tests/deploy

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
