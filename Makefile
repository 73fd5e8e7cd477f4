# Two commands do all their own set-up on a machine that has Python alone: `make train` and `make test`.
#   PYTHON=python3.12        the interpreter that makes the virtual environment
#   WHEELS="--index-url URL" where every wheel comes from; anything that pip install accepts (default: pip's own setting)
#   CPU_WHEELS="..."         where the CPU build of torch comes from on Linux without an NVIDIA GPU
PYTHON ?= python3
WHEELS ?=
CPU_WHEELS ?= --index-url https://download.pytorch.org/whl/cpu
VENV ?= .venv

constraints := constraints.txt
# Of the 19,000 modules that this installs few are imported; these are compiled then.
pip := $(VENV)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check $(WHEELS) --constraint $(constraints)
torch := $(shell sed -n 's/^torch==//p' constraints.txt)

# Linux without an NVIDIA GPU takes torch's CPU build, before anything that would pull the CUDA packages: first from
# pip's own setting (a local folder or mirror may hold it), else from PyTorch's.
needs_cpu_torch := $(shell [ "$$(uname -s)" = Linux ] && ! command -v nvidia-smi >/dev/null 2>&1 && echo yes)

# What each of the commands of tests runs stands in CONTRIBUTING.md; ARGS goes to pytest.
# Tests run in several processes at a time, where threads that spin while they wait slow down the others tenfold and more.
# Only tests set this: what users run follows their own environment.
test slow weekly oldest gpu: export OMP_WAIT_POLICY ?= PASSIVE
# Compiled modules and what mypy knows of the packages outlive a process and a clone.
export PYTHONDONTWRITEBYTECODE :=
export MYPY_CACHE_DIR ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/lowtide/mypy
# Material for MkDocs tells of its successor at each build.
export NO_MKDOCS_2_WARNING ?= 1

pytest := $(VENV)/bin/python -m pytest --numprocesses auto --dist worksteal

.PHONY: train test lint docs slow weekly oldest next gpu clean
.DEFAULT_GOAL := test

train: $(VENV)/.train
	$(VENV)/bin/lowtide train --compare --max_steps 200 $(ARGS)

test: $(VENV)/.lint
	@$(MAKE) --no-print-directory --jobs 2 lint $(VENV)/.test  # types are checked while the rest is installed
	$(pytest) $(if $(ROOM),--room $(ROOM)) $(ARGS)

lint: $(VENV)/.lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

slow: $(VENV)/.test
	$(pytest) --slow $(ARGS)
	$(pytest) --seed-offset 1 --judge $(ARGS)
	$(pytest) --seed-offset 2 $(ARGS)
	for level in default avx2; do \
	    ATEN_CPU_CAPABILITY=$$level $(pytest) tests/contract/test_values.py tests/mlp/test_memory.py || exit 1; done
	$(VENV)/bin/python tests/mutants.py

weekly: $(VENV)/.test
	for offset in $$(seq 3 22); do $(pytest) --seed-offset $$offset --order $$offset $(ARGS) || exit 1; done
	LOWTIDE_PROGRAMS=100000 $(pytest) --slow tests/programs
	$(MAKE) oldest next

# In the environment that has the GPU's build of torch, and lowtide.
gpu:
	$(PYTHON) -m pytest tests/gpu --numprocesses 12 $(ARGS)
	$(PYTHON) -m pytest tests/contract --device cuda --numprocesses 12 $(ARGS)

# Beside the pinned transformers, in a folder, the release that `pip install` brings today.
next := $(VENV)-next
next: $(VENV)/.test $(next)/.transformers
	PYTHONPATH=$(abspath $(next)) $(pytest) tests/models/test_every_type.py tests/models/test_forms.py tests/models/test_parts.py

# A second environment has the oldest torch that pyproject.toml allows, and the oldest transformers and peft for training.
# Compilers differ most between versions of torch, and what its graph holds, which checkpoints build on.
oldest: $(VENV)-oldest/.test
	$(VENV)-oldest/bin/python -m pytest --numprocesses auto --dist worksteal \
	    $(or $(ARGS),tests/train tests/trl_patch tests/models tests/memory tests/contract/test_compile.py)

docs: $(VENV)/.docs
	$(VENV)/bin/mkdocs build --strict

clean:
	rm -rf $(VENV) $(VENV)-oldest $(next) site build dist .pytest_cache .mypy_cache .ruff_cache

$(VENV)/.torch: constraints.txt
	$(PYTHON) -m venv $(VENV)
ifeq ($(needs_cpu_torch),yes)
	$(pip) "torch==$(torch)+cpu" 2>/dev/null || $(pip) $(CPU_WHEELS) "torch==$(torch)"
else
	$(pip) "torch==$(torch)"
endif
	@touch $@

$(VENV)/.train: $(VENV)/.torch pyproject.toml
	$(pip) --editable '.[train]'
	@touch $@

$(VENV)/.lint: $(VENV)/.torch
	$(pip) mypy numpy ruff safetensors
	@touch $@

$(VENV)/.test: $(VENV)/.lint pyproject.toml
	$(pip) --editable '.[test]'
	@touch $@

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	$(pip) --editable '.[docs]'
	@touch $@

$(next)/.transformers: $(VENV)/.torch
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check $(WHEELS) --no-deps --upgrade --target $(next) \
	    transformers
	@touch $@

oldest := $(shell sed -nE 's/^(train|peft) = .*"(transformers|peft)>=([0-9.]+)".*/"\2==\3.*"/p' pyproject.toml)
oldest_torch := $(shell sed -nE 's/^dependencies = \["torch>=([0-9.]+)"\]/\1.0/p' pyproject.toml)

$(VENV)-oldest/.test: constraints.txt pyproject.toml
	mkdir -p $(VENV)-oldest
	grep -vE '^(torch|triton|setuptools|transformers|tokenizers|peft)==' constraints.txt > $(VENV)-oldest/constraints.txt
	$(MAKE) VENV=$(VENV)-oldest constraints=$(VENV)-oldest/constraints.txt torch=$(oldest_torch) $(VENV)-oldest/.torch
	$(VENV)-oldest/bin/python -m pip install --quiet --disable-pip-version-check $(WHEELS) \
	    --constraint $(VENV)-oldest/constraints.txt $(oldest) --editable '.[test]'
	@touch $@
