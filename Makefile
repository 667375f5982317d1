# `make demo` and `make test` set everything up by themselves; a second call finds it there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MAKEFLAGS += --no-print-directory
# verl is for Python before 3.13.
VERL := $(shell $(PYTHON) -c 'import sys; print("$(VENV)-verl" if sys.version_info < (3, 13) else "")')

.PHONY: demo test environments lint develop bench clean

demo: $(VENV)/.local
	$(BIN)/obsspec demo

# Those of verl's agent loop run in an environment of their own, and first, so that what pytest says last is of most.
test:
	$(MAKE) --jobs 3 environments
	$(MAKE) lint
	$(if $(VERL),$(VERL)/bin/pytest tests/in_verl,@echo "left out: the tests of verl, which this Python is too new for")
	$(BIN)/pytest --numprocesses 2 --dist loadfile

environments: $(VENV)/.development $(VENV)-vllm/.complete $(addsuffix /.complete,$(VERL))

lint: $(VENV)/.development
	$(BIN)/ruff format --check src tests benchmarks examples
	$(BIN)/ruff check src tests benchmarks examples
	$(BIN)/mypy

# Everything that developing and the benchmarks need.
develop: $(VENV)/.development

# One benchmark: `make bench NAME=engine`; its figures also go to build/NAME.json.
bench: $(VENV)/.development
	@mkdir -p build
	$(BIN)/python benchmarks/$(NAME).py --json build/$(NAME).json

# constraints.txt pins torch to the CPU build: developing needs no GPU.
$(VENV)/.local: pyproject.toml constraints.txt
	@echo "setting up $(VENV), PyTorch included: a minute or more"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[local]'
	touch $@

$(VENV)/.development: $(VENV)/.local
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --group dev
	touch $@

# A vLLM server for the tests of its policy.
$(VENV)-vllm/.complete: scripts/vllm_environment.sh constraints.txt
	@echo "setting up $(VENV)-vllm, a vLLM that runs on CPUs: some minutes, 3.4 GB"
	PYTHON=$(PYTHON) scripts/vllm_environment.sh $(VENV)-vllm
	touch $@

# verl and Ray, for the tests of its agent loop.
$(VENV)-verl/.complete: scripts/verl_environment.sh constraints.txt pyproject.toml
	@echo "setting up $(VENV)-verl, verl with Ray on CPUs: some minutes, 2 GB"
	PYTHON=$(PYTHON) scripts/verl_environment.sh $(VENV)-verl
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-vllm $(VENV)-verl build .mypy_cache .pytest_cache .ruff_cache .hypothesis
