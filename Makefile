# Every command a contributor needs. Each builds the environment it runs in first.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
BACKEND ?= $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo cuda || echo cpu)
CXX_FILES = $(shell git ls-files 'csrc/*.h' 'csrc/*.inl' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh')

.PHONY: demo test lint format bench build cuda wheel test-abi clean
.DEFAULT_GOAL := demo

# The package is installed without its libraries: `build` puts those beside it, file by file.
$(VENV)/ready: pyproject.toml requirements-dev.txt requirements-oracles.txt tools/check_python.py
	@$(PYTHON) tools/check_python.py
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --requirement requirements-dev.txt
	$(PIP) install --no-deps --requirement requirements-oracles.txt
	DFLASH_BACKEND=none $(PIP) install --no-build-isolation --no-deps --editable .
	@touch $@

build: $(VENV)/ready
	DFLASH_BACKEND=$(BACKEND) $(PY) setup.py --quiet build_ext --inplace

demo: build
	@$(PY) -m benchmarks.demo

test: build
	$(PY) -m pytest

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_FILES)

format: $(VENV)/ready
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

bench: build
	$(PY) -m benchmarks.run

# Compiles _cuda for the default architecture; needs nvcc, no GPU.
cuda: $(VENV)/ready
	DFLASH_BACKEND=cuda $(PY) setup.py --quiet build_ext --inplace

# Without build/lib of the last time: it keeps modules that are gone.
wheel: $(VENV)/ready
	rm -rf build/lib* build/bdist* dist
	DFLASH_BACKEND=cuda $(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist .

# The promise of the stable ABI: one wheel, loaded under another Python and the oldest torch.
test-abi: wheel
	$(PY) tools/test_abi.py dist

clean:
	rm -rf build dist *.egg-info torch_dflash/*.so
