# Every target sets up what it needs, once: the virtual environment, the packages, the compiled ops.
#   FLOWTT_DEVICE=cpu|cuda overrides the detection of a GPU; PYTHON=... chooses the Python that makes the environment.
#   FLOWTT_BUILD_CUDA=1 builds the CUDA kernels where there is no GPU (nvcc takes minutes); CI does.
SHELL := /bin/bash
VENV ?= .venv
DEVICE := $(or $(FLOWTT_DEVICE),$(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu))
GPUS := $(if $(filter cuda,$(DEVICE)),$(shell nvidia-smi -L 2>/dev/null | wc -l),0)
# Processes of the main job: one a GPU, two on a CPU.
NPROC ?= $(if $(filter-out 0,$(GPUS)),$(GPUS),2)
CONFIG ?= configs/quickstart.yaml
# More options for train_dlrm.py, for example ARGS="--epochs 2".
ARGS ?=
PYTEST_ARGS ?=
# Processes that run tests. A file's tests stay in one process, as many share what its first one sets up.
TEST_JOBS ?= 2

ACTIVATE := source $(VENV)/bin/activate
INSTALLED := $(VENV)/.flowtt-$(DEVICE)
DEV := $(VENV)/.flowtt-dev
DOCS := $(VENV)/.flowtt-docs
BUILT := $(VENV)/.flowtt-built
BUILD_SETTINGS := $(VENV)/.flowtt-build-settings
SOURCES := $(shell find csrc -type f) setup.py pyproject.toml

# Threads that spin while they wait take the cores from each other where processes share them, hence PASSIVE for tests.
PYTEST := OMP_WAIT_POLICY=PASSIVE python -m pytest
IN_PARALLEL := -n $(TEST_JOBS) --dist loadfile

.PHONY: setup train test test-all test-cuda test-matrix wheel test-wheel lint format bench docs clean FORCE

setup: $(BUILT)

$(INSTALLED): requirements/base.txt requirements/$(DEVICE).txt requirements/fbgemm-gpu-shim/pyproject.toml
	scripts/setup.sh $(VENV) $(DEVICE)
	@touch $@

$(DOCS): requirements/docs.txt | $(INSTALLED)
	$(VENV)/bin/python -m pip install --quiet -r requirements/docs.txt
	@touch $@

$(DEV): requirements/dev.txt | $(INSTALLED)
	$(VENV)/bin/python -m pip install --quiet -r requirements/dev.txt
	@touch $@

# Changes when another build is asked for, and then only.
$(BUILD_SETTINGS): FORCE | $(INSTALLED)
	@echo '$(DEVICE) FLOWTT_BUILD_CUDA=$(FLOWTT_BUILD_CUDA) CI=$(CI)' | cmp -s - $@ || \
	 echo '$(DEVICE) FLOWTT_BUILD_CUDA=$(FLOWTT_BUILD_CUDA) CI=$(CI)' > $@

$(BUILT): $(INSTALLED) $(SOURCES) $(BUILD_SETTINGS)
	@echo "== building the compiled ops"
	$(VENV)/bin/python -m pip install --quiet --no-build-isolation --no-deps -e .
	@touch $@

# torchx runs `torchrun` from the PATH, hence the activated environment. train_dlrm.py sets its own threads;
# OMP_NUM_THREADS only keeps torchrun from talking about them.
train: $(BUILT)
	$(ACTIVATE) && OMP_NUM_THREADS=1 torchx run -s local_cwd -cfg log_dir=logs dist.ddp -j 1x$(NPROC) --script train_dlrm.py -- --config $(CONFIG) $(ARGS)

# What a contributor runs: all but the tests marked slow.
test: $(BUILT) $(DEV)
	$(ACTIVATE) && $(PYTEST) $(IN_PARALLEL) -m "not slow" $(PYTEST_ARGS)

# What CI runs: every test, and that the installed packages fit together.
test-all: $(BUILT) $(DEV)
	$(ACTIVATE) && python -m pip check && $(PYTEST) $(IN_PARALLEL) $(PYTEST_ARGS)

# One wheel for any Python and torch that are supported, and the source distribution, in dist/. With CUDA kernels where
# there is a GPU, or by FLOWTT_BUILD_CUDA=1.
wheel: $(INSTALLED) $(DEV)
	$(VENV)/bin/python scripts/wheel.py build

# Installs the wheel in new environments, with torch alone and with torchrec, and uses it there.
test-wheel: wheel
	$(VENV)/bin/python scripts/wheel.py test $(ARGS)

# The CUDA kernels on a CPU, under every check: part of `make test-all` too. On a GPU: scripts/gpu_check.sh.
test-cuda: $(BUILT) $(DEV)
	$(ACTIVATE) && python -m pytest tests/cuda_emulation tests/test_cuda_library.py tests/benchmarks/test_cuda_kernels.py tests/benchmarks/test_cuda_counts.py $(PYTEST_ARGS)
	$(ACTIVATE) && python -m pytest tests/test_ops.py tests/test_batch_errors.py -k cuda $(PYTEST_ARGS)

# The tests that touch TorchRec, with every TorchRec supported; gigabytes of packages. ARGS="--cells 1.9" takes one.
test-matrix:
	$(or $(PYTHON),python3) scripts/version_matrix.py $(ARGS)

lint: $(DEV)
	$(ACTIVATE) && ruff check . && ruff format --check . && mypy
	$(ACTIVATE) && clang-format --dry-run --Werror $$(git ls-files '*.h' '*.cpp' '*.inc' '*.cu' '*.cuh')

format: $(DEV)
	$(ACTIVATE) && ruff check --fix . && ruff format . && clang-format -i $$(git ls-files '*.h' '*.cpp' '*.inc' '*.cu' '*.cuh')

# The quick preset, about a minute and a half. The results go to build/; what the documentation quotes is in benchmarks/results/.
bench: $(BUILT) $(DEV)
	$(ACTIVATE) && python -m benchmarks.lookup --preset quick --json build/lookup_quick.json --csv build/lookup_quick.csv

# The documentation, to build/docs; warnings are errors. The tests run the code of its pages.
docs: $(BUILT) $(DOCS)
	$(ACTIVATE) && python -m sphinx -E -W --keep-going --quiet -b html docs build/docs

clean:
	rm -rf build *.egg-info flowtt_torchrec/_C*.so $(BUILT)
