# make demo    set everything up and train a small MoE model across four processes
# make test    set everything up and run the tests
# make check   lint, format, types
# make bench   measure this machine; writes benchmarks/results/
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test check bench clean

demo: $(READY)
	$(BIN)/expertwire demo

test: $(READY)
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	mkdir -p benchmarks/results
	$(BIN)/expertwire bench --suite standard --json benchmarks/results/cpu.json
	$(BIN)/expertwire bench --suite scaling --json benchmarks/results/cpu_scaling.json --plot docs/scaling.svg

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "expertwire needs Python 3.11 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,gpu]'
	@touch $@

clean:
	rm -rf $(VENV)
