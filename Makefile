# SPDX-License-Identifier: Apache-2.0
# `make demo` and `make test` build the environment by themselves; every other target does too.

PYTHON ?= python3
VENV ?= .venv
HAS_GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo yes)
EXTRAS := $(if $(HAS_GPU),gpu,cpu),dev
RUN := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

# Spinning threads of several processes on few cores cost far more than they give.
export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false

.PHONY: help install demo demo-text demo-video demo-cold-start test test-slow test-faults test-gpu fuzz check style license config docs docs-serve bench bench-algos bench-long soak learn build clean

help:                     ## show the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/:/' | column -t -s:

# On CPU torch comes first and alone, so that pip takes a CPU build where one is at hand.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 11) <= v < (3, 14) else \
	  f"Python {v[0]}.{v[1]} found, 3.11 to 3.13 needed: call make with PYTHON=python3.11")'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(if $(HAS_GPU),,$(RUN) -m pip install --quiet torch==2.13.0)
	$(RUN) -m pip install --quiet --editable '.[$(EXTRAS)]'
	touch $@

install: $(INSTALLED)     ## build .venv, with the CPU or the CUDA packages

demo: $(INSTALLED)        ## train a tiny vision-language model and show that it learns (minutes, no GPU)
	$(RUN) examples/quickstart/demo.py

demo-text: $(INSTALLED)   ## the same with a tiny language model
	$(RUN) examples/quickstart/demo.py --text

demo-video: $(INSTALLED)  ## the same with videos: which of two squares moves
	$(RUN) examples/quickstart/demo.py --video

demo-cold-start: $(INSTALLED)  ## a few answers are taught first, then reinforcement learning goes on from there
	$(RUN) examples/quickstart/cold_start.py

# Two processes: whole runs wait for one another's ranks, and those of two files fill the gaps.
test: $(INSTALLED)        ## the whole CPU suite
	$(RUN) -m pytest -n 2 --dist loadfile

test-slow: $(INSTALLED)   ## the tests that take minutes
	$(RUN) -m pytest -m slow

test-faults: $(INSTALLED) ## whole runs that are killed, damaged and starved; writes the table in docs/reliability.md (half an hour)
	$(RUN) -m pytest -m faults tests/faults

test-gpu: $(INSTALLED)    ## the tests that need CUDA; skipped without it
	$(RUN) -m pytest -m gpu tests/gpu

style: $(INSTALLED)       ## format
	$(RUN) -m ruff check --fix --select I verl tests scripts examples benchmarks
	$(RUN) -m ruff format verl tests scripts examples benchmarks

fuzz: $(INSTALLED)        ## search long for input that breaks the reading of configs, data, templates, rewards or checkpoints
	HYPOTHESIS_PROFILE=deep $(RUN) -m pytest tests/fuzz

check: $(INSTALLED)       ## lint, types, spelling
	$(RUN) -m ruff check verl tests scripts examples benchmarks
	$(RUN) -m ruff format --check verl tests scripts examples benchmarks
	$(RUN) -m pyright
	$(RUN) -m codespell_lib verl tests scripts examples benchmarks docs README.md Makefile

license: $(INSTALLED)     ## every source file names its licence
	$(RUN) -m pytest tests/architecture/test_license.py

config: $(INSTALLED)      ## regenerate examples/*.yaml, docs/options.md and the tables of docs/migration/verl.md
	$(RUN) -m verl.trainer.main --print-config > examples/config.yaml.new
	mv examples/config.yaml.new examples/config.yaml
	$(RUN) -m verl.trainer.sft --print-config > examples/sft.yaml.new
	mv examples/sft.yaml.new examples/sft.yaml
	$(RUN) -m verl.trainer.main --print-options > docs/options.md.new
	mv docs/options.md.new docs/options.md
	$(RUN) -m verl.config.renamed_keys docs/migration/verl.md

docs: $(INSTALLED)        ## build the pages below site/, which any browser opens; a broken link is an error
	$(RUN) -m mkdocs build --strict

docs-serve: $(INSTALLED)  ## the same on port 8000 of this machine, renewed when a page is saved
	$(RUN) -m mkdocs serve --strict

bench: $(INSTALLED)       ## what a step costs, beside the bare parts it is made of
	$(RUN) benchmarks/log_probs.py
	$(RUN) benchmarks/step.py
	$(RUN) benchmarks/lora.py

bench-algos: $(INSTALLED) ## the time of each advantage estimator on a large batch
	$(RUN) benchmarks/algorithms.py

bench-long: $(INSTALLED)  ## shared prompts, activations of ranks that share sequences, features computed once, seeking
	$(RUN) benchmarks/long.py
	$(RUN) benchmarks/embeddings.py
	$(RUN) benchmarks/video.py --keyframe-seconds 2 --containers mp4

soak: $(INSTALLED)        ## 200 steps with images: does memory, or anything else that a run holds, grow (minutes)
	$(RUN) benchmarks/soak.py

learn: $(INSTALLED)       ## a tiny run with each estimator and each loss; writes the table in docs/algorithms.md (half an hour)
	$(RUN) benchmarks/learning.py

build: $(INSTALLED)       ## wheel and sdist
	$(RUN) -m build

clean:                    ## remove the environment and build outputs
	rm -rf $(VENV) build dist *.egg-info
