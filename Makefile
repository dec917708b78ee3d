# Everything runs in ./.venv, made on first use. `make PYTHON=python3.12 ...` chooses the interpreter, `make compare ARGS="--help"` passes options.
PYTHON ?= python3
ARGS ?=
NB ?=
BIN := $(CURDIR)/.venv/bin
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --no-input -c constraints.txt
# pip compiles on one core, `compileall` on all of them; a few files of libraries are templates, which do not compile
COMPILE = $(BIN)/python -m compileall -qq -j 0 $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') || true
# Without a GPU of NVIDIA, the build of PyTorch without CUDA: 0.2 GB instead of several. `make CPU=0 ...` and `make CPU=1 ...` choose.
CPU ?= $(shell [ "$$(uname)" != Linux ] || [ -e /dev/nvidia0 ] || command -v nvidia-smi >/dev/null && echo 0 || echo 1)
PYTORCH_CPU := https://download.pytorch.org/whl/cpu
DESCRIPTION := setup.py settings.ini pyproject.toml constraints.txt
unexport PYTHONPATH PYTHONHOME PYTHONDONTWRITEBYTECODE
export PATH := $(BIN):$(PATH)

.PHONY: help compare backbones check test test-all faults wheel lab playground docs site prepare clean
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

compare: .venv/.dev ## show the finding in small: static and generated prompts before three layers (two minutes)
	@HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(BIN)/python results/crossing/who_reads.py $(ARGS)

backbones: .venv/.dev ## fetch SmolLM2, a real language model, into the user's cache (93 MB, once)
	@$(BIN)/idp fetch smollm2

FORMATTED := nbs idp_tutorial tests docs results configs setup.py
CHECKED := idp_tutorial tests docs results configs setup.py

check: .venv/.dev ## the checks that need no test: style, types, and whether notebooks and modules agree
	@$(BIN)/ruff check --quiet --output-format=concise $(CHECKED)
	@$(BIN)/ruff check --quiet --output-format=concise --select E501 nbs
	@$(BIN)/ruff format --quiet --check $(FORMATTED)
	@$(BIN)/mypy & mypy=$$!; $(BIN)/python docs/notebooks.py check && wait $$mypy

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test: check ## the checks and most tests, every chapter of the course included (ten minutes on two cores)
	@$(PYTEST) $(ARGS)

test-all: check ## the tests that `make test` leaves out because they take long
	@$(PYTEST) -m 'long and not slow' $(ARGS)

faults: .venv/.dev ## fault campaigns (an hour): kills, full disks, damaged files, two at once, random input; prints the counts
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 MPLBACKEND=Agg $(BIN)/python tests/faults/campaigns.py $(ARGS)

wheel: .venv/.dev ## test the wheel in an empty environment with the newest dependencies (minutes)
	@$(BIN)/python .ci/wheel $(ARGS)

# idle threads sleep, so that a chapter is several times faster where the cores are busy
lab: export OMP_WAIT_POLICY ?= PASSIVE
lab: .venv/.dev ## open the notebooks in JupyterLab
	@$(BIN)/jupyter lab --notebook-dir=. $(or $(ARGS),nbs/course/00_why.ipynb)

playground: .venv/.dev ## export the models of the site's playground (needs npm; minutes); then `make docs`
	@$(BIN)/python docs/playground.py

docs: .venv/.docs ## build the site: docs/_build/html/index.html
	@mkdir -p docs/_build/source
	@$(BIN)/python -m sphinx --quiet --fresh-env --write-all --fail-on-warning --keep-going -c docs -d docs/_build/doctrees docs/_build/source docs/_build/html
	@echo "The site is in docs/_build/html/index.html"

site: docs ## build the site, then open every page and notebook in a browser (needs Chromium)
	@IDP_SITE=all $(BIN)/python -m pytest -q tests/test_site.py $(ARGS)

prepare: .venv/.dev ## before a commit: format, export, re-run and clean the notebooks (NB="03 04": only these), README, checks
	@$(BIN)/ruff format --quiet $(FORMATTED)
	@$(BIN)/nbdev_export
	@$(BIN)/python docs/packages.py
	@$(BIN)/python docs/options.py
	@$(BIN)/python docs/notebooks.py run $(NB)
	@$(BIN)/python docs/notebooks.py readme
	@$(BIN)/ruff check --quiet --output-format=concise $(CHECKED)
	@$(BIN)/ruff format --quiet --check $(FORMATTED)
	@$(BIN)/python docs/notebooks.py check

clean: ## remove the environment and everything built
	rm -rf .venv build dist docs/_build *.egg-info

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python %d.%d found, 3.10 or newer is needed: make PYTHON=python3.12 ..." % sys.version_info[:2] if sys.version_info < (3,10) else 0)'
	@echo "Making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv .venv

.venv/.dev: $(DESCRIPTION) | .venv/bin/python
	@echo "Installing the library and its tools into .venv (minutes the first time, mostly torch)"
ifeq ($(CPU),1)
	@$(PIP) --no-deps --retries 1 --timeout 10 --index-url $(PYTORCH_CPU) torch 2>/dev/null \
		|| echo "No build of PyTorch for the CPU from $(PYTORCH_CPU): pip chooses the build"
endif
	@$(PIP) -e '.[dev]'
	@$(COMPILE)
	@touch $@

.venv/.docs: .venv/.dev
	@echo "Installing the site's tools"
	@$(PIP) -e '.[docs]'
	@$(COMPILE)
	@touch $@
