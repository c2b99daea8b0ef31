# The parts of CI, in the order of their length: what is begun last shall be short, or a core waits for it alone.
# Each says what it did when it has ended; all are run, whatever becomes of the others.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
KILLS := tests/drills tests/flows/test_errors.py tests/flows/test_first_run.py
RAY   := tests/cluster tests/sft
START := $(shell date +%s)
WHERE := $(if $(wildcard runs/*),runs/ci,runs)
SMOKE := .venv/bin/klear run configs/smoke --set workspace.root=$(WHERE)
say    = @printf '\n=== %s: %s (%ss)\n' '$@' '$(1)' "$$(($$(date +%s) - $(START)))"

# threads that wait for one another spin meanwhile, on a core that another part needs
export OMP_NUM_THREADS := 1

.PHONY: all vllm vllm-alone setup slow-kills slow-flows product desk slow-ray slow-rl slow-others fast smol locks lint
all: slow-kills slow-others fast slow-flows vllm smol slow-ray slow-rl product desk locks lint

setup:
	$(MAKE) setup
	$(call say,installed)

# without Klear until the other installation has ended: both would write the metadata of this checkout
vllm-alone:
	$(MAKE) vllm-alone
	$(call say,vLLM is installed)

vllm: vllm-alone

vllm slow-kills slow-flows product desk slow-ray slow-rl slow-others fast smol locks lint: setup

vllm:
	$(MAKE) test-vllm
	$(call say,the tests that need vLLM have passed in an environment of their own)

slow-kills:
	$(MAKE) test-slow TESTS="$(KILLS)"
	$(call say,runs that are killed or interrupted go on)

slow-flows:
	$(MAKE) test-slow TESTS="tests/flows $(KILLS:%=--ignore=%)"
	$(call say,the command and servers)

slow-rl:
	$(MAKE) test-slow TESTS=tests/rl
	$(call say,actors and kills)

slow-ray:
	$(MAKE) test-slow TESTS="$(RAY)"
	$(call say,several machines and gangs)

slow-others:
	$(MAKE) test-slow TESTS="$(patsubst %,--ignore=%,tests/drills tests/flows tests/rl $(RAY))"
	$(MAKE) test-adam8bit
	$(call say,all other slow tests)

# the README's commands come second in the same workspace, so that they find the smoke run's stages; in a used checkout it has its own
product:
	rm -rf runs/ci
	mkdir -p runs
	$(SMOKE) | tee runs/first.txt
	grep -q "✓ report" runs/first.txt
	grep -q "GPPO improved held-out avg@4" runs/first.txt
	grep -q "ask it   klear chat rl 'mod 6: " runs/first.txt
	$(SMOKE) | tee runs/second.txt
	grep -q "all stages reused" runs/second.txt
	env -u MAKEFLAGS -u MAKELEVEL .venv/bin/python tests/readme_commands.py
	$(call say,the smoke pipeline makes a better model; again with every stage reused; the commands of the README)

smol:
	$(MAKE) smol-ci
	$(call say,a published model learns, and answers as transformers has it answer)

desk:
	$(MAKE) desk-ci
	$(call say,math RL and then code RL are seen to learn)

fast:
	$(MAKE) test
	$(call say,the fast tests)

# what pyproject.toml allows resolves, for GPUs too, to the versions of the locks
locks:
	timeout 300 $(MAKE) locks
	git diff --exit-code infra/locks
	$(call say,every environment resolves to its lock)

lint:
	$(MAKE) lint
	$(call say,clean)
