# The commands of this project, the same for people and for CI. Needs GNU make and Python 3.11 or newer. Each target
# first installs missing packages into $(VENV) or into an environment beside it.

PYTHON ?= python3
VENV ?= .venv
# The requirement of torch for pip. If pip finds only the CUDA build, it installs this build, which works but is large.
# For the small build, name PyTorch's index of CPU wheels in PIP_EXTRA_INDEX_URL.
TORCH ?= torch==2.13.0
# A file of exact versions for pip, such as .ci/constraints.txt, which .ci/run uses.
CONSTRAINTS ?=
# The packages that the tests of trainers need besides the trainer.
TEST_TOOLS := hypothesis pytest pytest-asyncio pytest-timeout pytest-xdist
# Installed without its dependencies, which take 362 MB: tests compare Outrider's grading with swebench's, which needs
# none of them but unidiff.
SWEBENCH := "swebench>=5.0.2,<6" "unidiff>=0.7"
# Also installed without its dependencies, because tests use only its pages.
MINIWOB := "miniwob>=1.1,<1.2"
# Further arguments of a command, such as `make test ARGS="-k tree"` or `make demo ARGS=--json`.
ARGS ?=

# Trainers need hundreds of packages in their own versions, so each is installed into an environment beside $(VENV).
TRL_VENV ?= .venv-trl
VERL_VENV ?= .venv-verl
# For SkyRL and OpenRLHF, without their packages for GPUs.
SKYRL_VENV ?= .venv-skyrl
GYM_VENV ?= .venv-gym
TINKER_VENV ?= .venv-tinker
VERIFIERS_VENV ?= .venv-verifiers

# The folder of the agent programs that test-real installs.
PROGRAMS ?= $(CURDIR)/.cache/outrider

BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
CONSTRAINT := $(if $(CONSTRAINTS),--constraint $(CONSTRAINTS))
# `$(INSTALL) VENV ARGUMENT...` installs with uv, which takes an eighth of pip's processor time. If uv fails, it
# installs with pip, because uv does not read pip's settings, which may name another registry. Only pip installs torch,
# see TORCH.
INSTALL := install_into() { venv=$$1; shift; \
	"$$venv/bin/python" -m uv pip install --quiet --python "$$venv/bin/python" "$$@" || \
	{ echo "uv has failed: trying pip"; "$$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$$@"; }; }; \
	install_into
# `$(NEW_VENV) VENV` makes an environment with pip, uv and torch.
NEW_VENV := new_venv() { \
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "$(PYTHON) must be Python 3.11 or newer: name another one with make PYTHON=..." >&2; return 1; }; \
	test -x "$$1/bin/python" || $(PYTHON) -m venv "$$1" || return 1; \
	"$$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile $(CONSTRAINT) uv $(TORCH); }; new_venv
# `$(PYTHON_312)` prints the command of a Python 3.12 or 3.13, if one is installed. Candidates are run, because a
# command of pyenv may exist without an installed version.
PYTHON_312 := python_312() { \
	for name in $(PYTHON) python3.12 python3.13 $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/3.1[23].*/bin/python); do \
	"$$name" -c 'import sys, ensurepip; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' 2>/dev/null && \
	{ echo "$$name"; return; }; done; }; python_312
# Tests and benchmarks run several processes at once, so torch must not use every core in each process.
ONE_THREAD := OMP_NUM_THREADS=1
# Tests start hundreds of Python programs. Without stored compiled files each would compile its imports again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo train test test-deep test-nightly check test-real trainers test-trainers test-verl test-trl test-skyrl test-gym test-tinker test-verifiers check-latest fuzz campaign bench page policy clean

help: ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

venv: $(STAMPS)/dev ## install Outrider for development into .venv

demo: $(STAMPS)/demo ## roll out 32 sessions with a real (tiny) model in real sandboxes
	$(BIN)/outrider demo $(ARGS)

train: $(TRL_VENV)/.stamps/train ## train the demo's policy with TRL until it is right nearly every time (minutes)
	$(TRL_VENV)/bin/outrider demo --train $(ARGS)

# Three workers, even on two cores, because many tests wait for other processes. A fourth costs more than it saves.
test: $(STAMPS)/dev ## the fast tests
	$(ONE_THREAD) $(BIN)/pytest -n 3 --dist worksteal $(ARGS)

test-deep: $(STAMPS)/dev ## the slow tests: storms, floods, PostgreSQL, restarts
	$(ONE_THREAD) $(BIN)/pytest -n 3 --dist worksteal -m "deep and not real and not nightly" \
		--timeout 600 --durations 25 --durations-min 5 $(ARGS)

test-nightly: $(STAMPS)/real $(VERL_VENV)/.stamps/dev $(TRL_VENV)/.stamps/dev ## the tests that .ci/run leaves out: hundreds of random examples, every pair and variant, a campaign, a soak
	$(ONE_THREAD) $(BIN)/pytest -n 3 --dist worksteal -m "(nightly or hypothesis) and not real and not trainers" \
		--hypothesis-profile nightly --timeout 600 --durations 25 --durations-min 5 $(ARGS)
	$(ONE_THREAD) OUTRIDER_HOME=$(PROGRAMS) $(BIN)/pytest -n 2 --dist loadscope -m "nightly and real" \
		--durations 25 --durations-min 5 tests/real tests/bench tests/runtimes $(ARGS)
	$(ONE_THREAD) $(VERL_VENV)/bin/pytest -W default -m "trainers and nightly" tests/trainers/verl $(ARGS)
	$(ONE_THREAD) $(TRL_VENV)/bin/pytest -m "trainers and nightly" tests/trainers/trl $(ARGS)

check: $(STAMPS)/dev ## formatting, lint and types
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

# The folders are in the order in which their tests begin. The tests outside of tests/real run one after another (see
# RealPrograms in tests/conftest.py), which takes longest, so they begin first. Three workers for two processors,
# because the tests often wait for the programs that they start.
test-real: $(STAMPS)/real ## tests with real programs: vLLM on CPU, routers, agents, Helm (installs them; 4 GB), and installed container engines
	$(ONE_THREAD) OUTRIDER_HOME=$(PROGRAMS) $(BIN)/pytest -n 3 --dist loadscope --no-loadscope-reorder -m "real and not nightly" \
		--durations 25 --durations-min 5 tests/runtimes tests/sandboxes tests/bench tests/evaluators tests/rootfs tests/deploy tests/real $(ARGS)

# Makes the environments of all trainers.
trainers: $(TRL_VENV)/.stamps/dev $(VERL_VENV)/.stamps/dev $(SKYRL_VENV)/.stamps/dev $(GYM_VENV)/.stamps/dev $(TINKER_VENV)/.stamps/dev $(VERIFIERS_VENV)/.stamps/dev

# Two trainers at a time on two cores, because most of their tests keep one core busy.
TRAINERS_AT_ONCE ?= 2
test-trainers: trainers ## tests with the packages of real trainers (installs them)
	$(MAKE) --no-print-directory --jobs $(TRAINERS_AT_ONCE) --output-sync test-verl test-trl test-skyrl test-gym test-tinker test-verifiers

# Warnings are not errors here, because verl, tinker and verifiers cause many when they are imported.
test-verl: $(VERL_VENV)/.stamps/dev
	$(ONE_THREAD) $(VERL_VENV)/bin/pytest -W default -m "trainers and not nightly" tests/trainers/verl tests/fleet $(ARGS)

# The second command runs the tests that need transformers, which `make test` and `make test-deep` skip.
test-trl: $(TRL_VENV)/.stamps/dev
	$(ONE_THREAD) $(TRL_VENV)/bin/pytest -m "trainers and not nightly" tests/trainers/trl $(ARGS)
	$(ONE_THREAD) $(TRL_VENV)/bin/pytest -m transformers tests/relay tests/engines/test_embedded.py tests/test_pixels.py \
		tests/trainers/test_slime_images.py tests/demo/test_policy.py $(ARGS)

# Two runs of pytest, because SkyRL 0.4 would use the stand-ins for vLLM that the tests of OpenRLHF import.
test-skyrl: $(SKYRL_VENV)/.stamps/dev
	$(ONE_THREAD) $(SKYRL_VENV)/bin/pytest -W default -m trainers tests/trainers/skyrl $(ARGS)
	$(ONE_THREAD) $(SKYRL_VENV)/bin/pytest -W default -m trainers tests/trainers/openrlhf $(ARGS)

# Warnings are not errors here, because pydantic and Ray cause some.
test-gym: $(GYM_VENV)/.stamps/dev
	@test -x $(GYM_VENV)/bin/pytest || echo "NeMo Gym needs Python 3.12, which is not here: its tests are skipped"
	test ! -x $(GYM_VENV)/bin/pytest || \
		$(ONE_THREAD) $(GYM_VENV)/bin/pytest -W default -m trainers tests/trainers/nemo_gym $(ARGS)

# The tests train on SkyRL's server for Tinker's interface, in which JAX must use the processor only.
test-tinker: $(TINKER_VENV)/.stamps/dev
	$(ONE_THREAD) JAX_PLATFORMS=cpu $(TINKER_VENV)/bin/pytest -W default -m trainers tests/trainers/tinker $(ARGS)

# Warnings are not errors here, because pydantic causes some.
test-verifiers: $(VERIFIERS_VENV)/.stamps/dev
	$(ONE_THREAD) $(VERIFIERS_VENV)/bin/pytest -W default -m trainers tests/trainers/verifiers $(ARGS)

check-latest: $(STAMPS)/dev ## try the bridges with the newest versions of the trainers: ARGS="trl --json"
	$(BIN)/python scripts/check_latest.py $(ARGS)

fuzz: $(STAMPS)/dev ## send 100,000 odd and broken requests to the gateway in each dialect (minutes per dialect)
	$(foreach dialect,chat responses messages gemini,\
		$(ONE_THREAD) $(BIN)/python scripts/fuzz_gateway.py --dialect $(dialect) $(ARGS) &&) true

campaign: $(STAMPS)/dev ## break a running service at random: ARGS="--runs 20 --seed 1 --json" (half a minute per run)
	$(ONE_THREAD) $(BIN)/python -m campaign $(ARGS)

bench: $(STAMPS)/dev ## run the benchmarks, and write tables and JSON into bench/results
	$(ONE_THREAD) $(BIN)/python -m bench $(ARGS)

page: ## build the page's bundle from the sources in page/, with npm
	cd page && npm ci --no-audit --no-fund && npx tsc --noEmit && node build.mjs $(ARGS)

policy: $(STAMPS)/demo ## train the demo's tiny policy anew (half a minute)
	$(BIN)/python scripts/train_policy.py $(ARGS)

clean: ## remove everything that these commands installed or cached
	rm -rf $(VENV) $(TRL_VENV) $(VERL_VENV) $(SKYRL_VENV) $(GYM_VENV) $(TINKER_VENV) $(VERIFIERS_VENV) .venv-routers .venv-harbor .venv-kubernetes .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis outrider-demo
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A stamp file records an installation. If the stamp is newer than its prerequisites, make installs nothing.

$(STAMPS)/torch:
	@echo "Making $(VENV) with $$($(PYTHON) --version), and installing $(TORCH): this may take some minutes"
	@$(NEW_VENV) $(VENV)
	@mkdir -p $(@D) && touch $@

$(STAMPS)/demo: $(STAMPS)/torch pyproject.toml
	@echo "Installing Outrider and what its demo needs"
	@$(INSTALL) $(VENV) $(CONSTRAINT) --editable ".[demo]"
	@touch $@

# All modules are compiled here, because sandboxes mount this environment read-only and could not store compiled files.
$(STAMPS)/dev: $(STAMPS)/demo
	@echo "Installing the tools for tests and checks"
	@$(INSTALL) $(VENV) $(CONSTRAINT) --editable ".[demo,dev]"
	@$(INSTALL) $(VENV) $(CONSTRAINT) --no-deps $(SWEBENCH)
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # some packages have templates that are not valid Python
	@touch $@

$(STAMPS)/real: $(STAMPS)/dev
	@echo "Installing transformers, which recomputes log-probabilities in tests/real, pages of MiniWoB, and reasoning-gym"
	@$(INSTALL) $(VENV) $(CONSTRAINT) "transformers>=5.16"
	@$(INSTALL) $(VENV) $(CONSTRAINT) --no-deps $(MINIWOB)
	@$(INSTALL) $(VENV) $(CONSTRAINT) --editable ".[reasoning-gym]" || \
		echo "reasoning-gym cannot be installed here (see above; pycosat may need a C compiler): its tests are skipped"
	@$(INSTALL) $(VENV) $(CONSTRAINT) --editable ".[page-tests]" || \
		echo "Playwright cannot be installed here (see above): the tests of the page in a browser are skipped"
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # in the tests, warnings of the compiler would be errors
	@touch $@

$(TRL_VENV)/.stamps/train: pyproject.toml
	@echo "Installing $(TORCH), TRL and what training needs into $(TRL_VENV)"
	@$(NEW_VENV) $(TRL_VENV)
	@$(INSTALL) $(TRL_VENV) $(CONSTRAINT) --editable ".[train]"
	@mkdir -p $(@D) && touch $@

$(TRL_VENV)/.stamps/dev: $(TRL_VENV)/.stamps/train
	@echo "Installing the tools for tests into $(TRL_VENV)"
	@$(INSTALL) $(TRL_VENV) $(CONSTRAINT) --editable ".[train,dev]"
	@touch $@

# Without CONSTRAINTS, because verl requires older versions of packages than Outrider's own tests. The tests export
# samples for tinker and verifiers.
$(VERL_VENV)/.stamps/dev: pyproject.toml
	@echo "Installing $(TORCH), verl and the tools for its tests into $(VERL_VENV)"
	@$(NEW_VENV) $(VERL_VENV)
	@$(INSTALL) $(VERL_VENV) --editable ".[verl]" $(TEST_TOOLS) tinker==0.24.1 verifiers==0.4.0
	@mkdir -p $(@D) && touch $@

# Both packages require CUDA extensions, and pin different versions of the same packages. They are therefore installed
# without dependencies, beside the packages that their tests need. SkyRL 0.4 requires Python 3.12, for which pip may
# find only the CUDA build of torch (5 GB). The modules that the tests import also work on Python 3.11.
$(SKYRL_VENV)/.stamps/dev: pyproject.toml
	@echo "Installing $(TORCH), SkyRL, OpenRLHF and what their tests need into $(SKYRL_VENV)"
	@$(NEW_VENV) $(SKYRL_VENV)
	@$(INSTALL) $(SKYRL_VENV) --editable . $(TEST_TOOLS) \
		transformers==5.16.1 "ray[default]==2.57.0" hydra-core==1.3.4 pybase64 peft==0.18.1 accelerate cloudpathlib \
		datasets func_timeout jaxtyping loguru polars pylatexenc sympy tensordict torchdata
	@$(SKYRL_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
		openrlhf==0.11.2 skyrl==0.4.0 skyrl-gym==0.4.0
	@mkdir -p $(@D) && touch $@

# Without torch, and with only the packages that NeMo Gym's agent servers and client import. NeMo Gym 0.7 requires
# Python 3.13.14, but the modules that the tests import also work on Python 3.12. If neither Python 3.12 nor 3.13 is
# installed, nothing is installed and there is no stamp.
$(GYM_VENV)/.stamps/dev: pyproject.toml
	@python=$$($(PYTHON_312)); test -n "$$python" || exit 0; \
	echo "Installing NeMo Gym and what its tests need into $(GYM_VENV)"; \
	test -x $(GYM_VENV)/bin/python || "$$python" -m venv $(GYM_VENV) || exit 1; \
	$(GYM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile uv || exit 1; \
	($(INSTALL) $(GYM_VENV) --editable . $(TEST_TOOLS) anthropic==0.109.2 openai==2.44.0 ray==2.58.0 gprof2dot \
		hydra-core==1.3.2 itsdangerous pandas psutil pydot python-multipart requests scipy tqdm wandb yappi) || exit 1; \
	$(GYM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
		nemo-gym==0.7.0 || exit 1; \
	mkdir -p $(@D) && touch $@

# The cookbook and SkyRL are installed without dependencies. The cookbook requires a package of renderers for one family
# of models, which may not be available and which no test imports. SkyRL's server is used without SkyRL's trainers, and
# requires an older tinker than the cookbook.
$(TINKER_VENV)/.stamps/dev: pyproject.toml
	@echo "Installing $(TORCH), tinker-cookbook and SkyRL's server into $(TINKER_VENV)"
	@$(NEW_VENV) $(TINKER_VENV)
	@$(INSTALL) $(TINKER_VENV) --editable . $(TEST_TOOLS) tinker==0.38.0 transformers==5.24.0 \
		aiohttp aiosqlite blobfile chz cloudpathlib cloudpickle datasets fastapi flax==0.12.8 hydra-core jax==0.10.2 loguru \
		omegaconf optax peft==0.18.1 pillow psutil pyrage ray==2.57.0 requests rich safetensors "sqlalchemy[asyncio]" sqlmodel termcolor \
		tiktoken tqdm typer zstandard
	@$(TINKER_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --ignore-requires-python \
		tinker-cookbook==0.6.1 skyrl==0.4.0
	@mkdir -p $(@D) && touch $@

# Without torch, which only prime-rl's trainer imports, and without CONSTRAINTS, because verifiers requires an older
# openai.
$(VERIFIERS_VENV)/.stamps/dev: pyproject.toml
	@echo "Installing verifiers and the tools for its tests into $(VERIFIERS_VENV)"
	@test -x $(VERIFIERS_VENV)/bin/python || $(PYTHON) -m venv $(VERIFIERS_VENV)
	@$(VERIFIERS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile uv
	@$(INSTALL) $(VERIFIERS_VENV) --editable ".[verifiers]" $(TEST_TOOLS) verifiers==0.4.0
	@mkdir -p $(@D) && touch $@
