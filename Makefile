# Everything a newcomer needs: `make serve` to talk to it, `make test` to check it.

VENV      ?= .venv
PYTHON    ?= python3
BIN       := $(VENV)/bin
STAMP     := $(VENV)/.installed
PRESET    ?= k2-small
MODEL     ?= checkpoints/$(PRESET)
# Only needed where pip would otherwise bring torch's large CUDA build to a machine without a GPU.
TORCH_INDEX ?=

# Worker processes share few cores: a waiting OpenMP thread must sleep, not spin. Nothing looks up a hub.
export OMP_WAIT_POLICY := PASSIVE
export HF_HUB_OFFLINE := 1

.PHONY: help install serve test test-browser test-rdma api-cases soak soak-pool check fmt bench public-names clean

help:
	@echo "make install   .venv with pinned dependencies (torch for CPU: TORCH_INDEX=https://download.pytorch.org/whl/cpu)"
	@echo "make serve     write $(MODEL) once (PRESET=k2-nano|k2-tiny|k2-small), serve it on 127.0.0.1:8000"
	@echo "make test      all checks and all tests      make check  the checks alone      make fmt  format"
	@echo "make test-browser  the web page in a headless chromium (Debian's, installed by apt where it is missing)"
	@echo "make test-rdma  transfer over real verbs, on a virtual machine with two Soft-RoCE devices"
	@echo "make api-cases 2,000 schemathesis cases of the OpenAPI document against a live k2-nano (CASES=2000)"
	@echo "make soak      random faults on simulated clusters (SEEDS=1000 FIRST=0)"
	@echo "make soak-pool a pool node killed in mid-put and mid-get (KILLS=200)"
	@echo "make bench     the benchmarks behind the README's numbers"
	@echo "make clean     forget .venv, caches and checkpoints"

install: $(STAMP)

# torch goes in first and alone: resolved together with the rest, pip would look at every release of it.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "mooncake needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12" >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt pip setuptools
	$(BIN)/python -m pip install --quiet --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	$(BIN)/python -m pip install -qq --constraint constraints.txt --no-build-isolation --editable '.[api,ray,dev]'
	@touch $@

$(MODEL)/config.json: | $(STAMP)
	$(BIN)/mooncake model init --preset $(PRESET) --seed 0 --out $(MODEL)

serve: $(STAMP) $(MODEL)/config.json
	@exec $(BIN)/mooncake serve $(MODEL) --served-model-name $(PRESET) $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q tests/arch

test: check
	$(BIN)/pytest -q --ignore tests/arch --ignore tests/browser

# Skips, saying why, where there is no chromium and none can be installed.
test-browser: $(STAMP)
	@command -v chromium >/dev/null || timeout 600 sh -c 'apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
	  apt-get -qq install --yes --no-install-recommends chromium fonts-dejavu-core' >/dev/null 2>&1 || true
	$(BIN)/pytest -q tests/browser

# On a virtual machine with two software RDMA devices; skips, saying why, where none can be had.
test-rdma: $(STAMP)
	$(BIN)/python -m tests.rdma.machine --timeout-s 900 -- $(abspath $(BIN))/python -m pytest -q --color=no \
	  -p no:cacheprovider -k rdma tests/rdma tests/unit/transfer/test_processes.py tests/unit/transfer/test_failures.py \
	  tests/unit/transfer/test_notices.py tests/unit/transfer/test_staging.py

CASES ?= 2000
api-cases: $(STAMP)
	API_CASES=$(CASES) $(BIN)/pytest -q --timeout 3600 tests/integration/test_openapi_cases.py

# Faults on simulated clusters, one seed after another: make soak SEEDS=10000 FIRST=0
SEEDS ?= 1000
FIRST ?= 0
soak: $(STAMP)
	SOAK_SEEDS=$(SEEDS) SOAK_FIRST=$(FIRST) $(BIN)/pytest -q -x tests/sim/test_seeds.py -k every_check

# A pool node killed in mid-put and mid-get, again and again: make soak-pool KILLS=1000
KILLS ?= 200
soak-pool: $(STAMP)
	MOONCAKE_NUM_KILLS=$(KILLS) $(BIN)/pytest -q tests/integration/test_pool_faults.py -k killed --timeout 36000

fmt: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) $(MODEL)/config.json
	$(BIN)/python -m benchmarks $(ARGS)

public-names: $(STAMP)
	$(BIN)/python -m tests.support.public_names --write

clean:
	rm -rf $(VENV) checkpoints build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
