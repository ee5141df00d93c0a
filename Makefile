# On a fresh machine `make demo` installs the package and shows the main job, `make chat` gets a real model too and chats with it, and `make test`
# installs all that development needs and passes the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo chat test test-scripts test-all test-processors test-oldest test-newest test-rooms test-core lint kernels format docs tables families pictures notebooks package bench quality studies clean

demo: $(VENV)/package
	$(BIN)/qkvcache demo

# A chat with SmolLM2-135M-Instruct about a long document; without a terminal, a few questions. CHAT="--document FILE --model MODEL" are its options.
chat: $(VENV)/package
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[gguf]'
	OMP_WAIT_POLICY=passive $(BIN)/python examples/chat.py $(CHAT)

test: $(VENV)/installed
	$(BIN)/pytest -n auto --dist worksteal -m "not slow" $(SCRIPTS:%=--ignore=%)

# What is around the package: the scripts in eval/, which measure, show and draw, the examples, and the code in the pages of the site.
SCRIPTS := tests/eval tests/examples tests/docs
test-scripts: $(VENV)/installed
	$(BIN)/pytest -n auto --dist worksteal -m "not slow" $(SCRIPTS)

# Every format, policy and option with every other, which takes hours on two cores, the tests marked slow, and the notebooks in kernels.
test-all: $(VENV)/installed
	QKVCACHE_TEST_ALL=1 $(BIN)/pytest -n auto --dist worksteal --nbmake --nbmake-timeout=300

# What sums floating-point numbers, as on processors without AVX-512, which sum in another order, and without any of the wider vectors;
# with another seed and two threads.
test-processors: $(VENV)/installed
	MKL_ENABLE_INSTRUCTIONS=AVX2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/pytest -n auto --dist worksteal -m "sums and not slow"
	MKL_ENABLE_INSTRUCTIONS=SSE4_2 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 OMP_WAIT_POLICY=passive \
	QKVCACHE_TEST_SEED=1 QKVCACHE_TEST_THREADS=2 $(BIN)/pytest -n auto --dist worksteal -m "sums and not slow"

# The promises that transformers makes us, on the oldest release that we support, and on the last one that calls a cache `past_key_values`.
test-oldest: $(VENV)-oldest/installed $(VENV)-previous/installed
	$(VENV)-oldest/bin/pytest -n auto --dist worksteal -m contract
	$(VENV)-previous/bin/pytest -n auto --dist worksteal -m contract

# The newest transformers below the bound of pyproject.toml: the promises, a batch, a served request and a dozen families. torch stays the one
# that development uses, since the newest may have no build for CPUs; where it has one: make test-newest NEWEST="'transformers<6' torch".
NEWEST ?= 'transformers<6' $(shell grep ^torch== constraints.txt)
FAMILIES := llama,mistral,qwen3,qwen3_moe,qwen3_next,gemma3,gemma4,gpt_oss,phi3,deepseek_v3,falcon,t5
test-newest: $(VENV)-newest/installed
	$(VENV)-newest/bin/pip install --quiet --upgrade --constraint build/newest.txt $(NEWEST)
	$(VENV)-newest/bin/pip list 2>/dev/null | grep -E '^(torch|transformers) '
	status=0; \
	$(VENV)-newest/bin/pytest -n auto --dist worksteal -m contract || status=1; \
	$(VENV)-newest/bin/pytest tests/batching/test_answers.py tests/batching/test_server.py -k 'answer_as_generate or answers_are_those' || status=1; \
	$(VENV)-newest/bin/python eval/families.py --check --only $(FAMILIES) || status=1; \
	exit $$status

# Every family of transformers as a tiny model: no feature of a cache works on fewer of them than the rows say.
families: $(VENV)/installed
	$(BIN)/python eval/families.py --check

# Rooms can be deleted: each in a copy, in which everything that is left is linted and collected.
test-rooms: $(VENV)/installed
	$(BIN)/python eval/rooms.py --delete
	$(BIN)/pytest -m slow tests/test_rooms.py

# The short suite of the core without two rooms, which the date draws.
test-core: $(VENV)/installed
	$(BIN)/python eval/rooms.py --tests

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Compiles the kernels for GPUs that are not here, and looks for spills.
kernels: $(VENV)/installed
	$(BIN)/python eval/compile_kernels.py --quick

# The site, in build/site; `$(BIN)/mkdocs serve` shows it while it is written.
docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The tables of README and of the site, from the rows; and the pictures.
tables: $(VENV)/installed
	$(BIN)/python eval/pages.py

pictures: $(VENV)/installed
	$(BIN)/python eval/summary.py picture
	$(BIN)/python eval/quality.py --plot
	$(BIN)/python eval/quality.py --model smollm2 --plot
	$(BIN)/python eval/quality.py --model smollm2 --out eval/results/quality_policies.jsonl --plot
	$(BIN)/python eval/bench_kernels.py --plot
	$(BIN)/python eval/bench_generate.py --plot
	$(BIN)/python eval/bench_turns.py --plot
	$(BIN)/python eval/bench_batching.py --plot

# The notebooks again, with their outputs.
notebooks: $(VENV)/installed
	$(BIN)/python eval/notebooks.py

# A wheel, made from the sdist, and the demo from it in an empty environment and another directory.
package: $(VENV)/installed
	rm -rf dist build/lib build/empty
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv build/empty
	build/empty/bin/pip install --quiet --constraint constraints.txt dist/*.whl
	cd build/empty && bin/qkvcache demo --formats int8,turboquant_4bit_nc --dtype float32
	rm -rf build/empty

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python eval/bench_cpu_decode.py

# The table and the picture of the embedded model's quality: some ten minutes on two cores.
quality: $(VENV)/installed
	$(BIN)/python eval/quality.py
	$(BIN)/python eval/quality.py --plot
	$(BIN)/python eval/quality.py --markdown

# Endless streams: the picture, on a model with attention sinks, and the embedded model.
studies: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python examples/streaming.py --plot examples/streaming.png --rows eval/results/streaming_smollm2.jsonl
	$(BIN)/python examples/streaming.py --model demo --tokens 200000 --window 1020 --every 10000 --rows eval/results/streaming.jsonl

# The package and what it needs to run.
$(VENV)/package: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

# All that development needs.
$(VENV)/installed: $(VENV)/package
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)-oldest/installed $(VENV)-previous/installed: $(VENV)-%/installed: pyproject.toml constraints-%.txt
	$(PYTHON) -m venv $(VENV)-$*
	$(VENV)-$*/bin/pip install --quiet --constraint constraints-$*.txt --editable '.[dev]'
	touch $@

$(VENV)-newest/installed: pyproject.toml constraints.txt
	mkdir -p build
	grep -v -e ^torch== -e ^transformers== constraints.txt > build/newest.txt
	$(PYTHON) -m venv $(VENV)-newest
	$(VENV)-newest/bin/pip install --quiet --constraint build/newest.txt --editable '.[dev]' $(NEWEST)
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-previous $(VENV)-newest build *.egg-info .pytest_cache .mypy_cache .ruff_cache
