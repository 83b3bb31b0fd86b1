# Every command a contributor needs. `make demo` and `make test` build their own environment first.
VENV ?= .venv
PYTHON ?= python3
PY := $(VENV)/bin/python
BACKEND ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU && echo cuda || echo cpu)
export DFLASH_BACKEND := $(BACKEND)

.PHONY: demo test lint format bench build test-abi cuda wheel clean
.DEFAULT_GOAL := demo

$(VENV)/ready: pyproject.toml requirements-dev.txt
	$(PYTHON) tools/check_python.py
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet -r requirements-dev.txt
	touch $@

build: $(VENV)/ready
	$(PY) -m pip install --quiet --no-build-isolation --no-deps --editable .

demo: build
	$(PY) -m benchmarks.demo

test: build
	$(PY) -m pytest

lint: $(VENV)/ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files 'csrc/*.h' 'csrc/*.inl' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh')

format: $(VENV)/ready
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $$(git ls-files 'csrc/*.h' 'csrc/*.inl' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh')

bench: build
	$(PY) -m benchmarks.run

# Compiles _cuda for the default architecture; needs nvcc, no GPU.
cuda: $(VENV)/ready
	DFLASH_BACKEND=cuda $(PY) setup.py --quiet build_ext --inplace

wheel: $(VENV)/ready
	DFLASH_BACKEND=cuda $(PY) -m pip wheel --quiet --no-build-isolation --no-deps --wheel-dir dist .

# The promise of the stable ABI: one wheel, loaded under another Python and the oldest torch.
test-abi: wheel
	$(PY) tools/test_abi.py dist

clean:
	rm -rf build dist *.egg-info torch_dflash/*.so
