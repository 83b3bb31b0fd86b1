# Every command a contributor needs. Each builds the environment it runs in first.
VENV ?= .venv
PYTHON ?= python3
VLLM_VENV ?= .venv-vllm
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --quiet
BACKEND ?= $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo cuda || echo cpu)
# ninja prints every command; a failure shows its errors
COMPILE = @mkdir -p build && echo "compiling for $(1), see build/log" && \
	DFLASH_BACKEND=$(1) $(PY) setup.py build_ext --inplace >build/log 2>&1 || { grep -E 'error|FAILED' build/log | head -n 20; exit 1; }
CXX_FILES = $(shell git ls-files 'csrc/*.h' 'csrc/*.inl' 'csrc/*.cpp' 'csrc/*.cu' 'csrc/*.cuh')

.PHONY: cuda-archs demo test test-vllm lint format bench build cuda wheel test-abi clean
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
	$(call COMPILE,$(BACKEND))

demo: build
	@$(PY) -m benchmarks.demo

test: build
	$(PY) -m pytest

# Real vLLM engines on the CPU, in an environment of their own.
$(VLLM_VENV)/ready: pyproject.toml requirements-dev.txt requirements-vllm.txt tools/vllm_env.py
	$(PYTHON) tools/vllm_env.py $(VLLM_VENV)
	@touch $@

test-vllm: build $(VLLM_VENV)/ready
	$(VLLM_VENV)/bin/python -m pytest tests/vllm

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
	$(PY) -m benchmarks.held_out
	$(PY) -m benchmarks.cpu_matmul

# Compiles _cuda for the default architecture; needs nvcc, no GPU.
cuda: $(VENV)/ready
	$(call COMPILE,cuda)

# Every CUDA source for the architectures that nobody measured, and what each kernel takes; no GPU.
cuda-archs: $(VENV)/ready
	$(PY) tools/cuda_resources.py

# Without build/lib of the last time: it keeps modules that are gone.
wheel: $(VENV)/ready
	rm -rf build/lib* build/bdist* dist
	DFLASH_BACKEND=cuda $(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist .

# The promise of the stable ABI: one wheel, loaded under another Python and the oldest torch.
test-abi: wheel
	$(PY) tools/test_abi.py dist

clean:
	rm -rf build dist *.egg-info torch_dflash/*.so
