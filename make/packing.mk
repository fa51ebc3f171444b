# Targets of the packer. Included by the Makefile, whose VENV, BIN and venv they use.
PACKING_TESTS := $(wildcard tests/unit/test_packing*.py tests/property/test_packing*.py)

.PHONY: sanitize gpu-check bench

sanitize: venv  ## the packer's tests under AddressSanitizer and UBSan, its threads under ThreadSanitizer
	$(BIN)/python tests/sanitize.py $(PACKING_TESTS)

gpu-check: venv  ## what needs a GPU: the CUDA packer's tests, compute-sanitizer, rates
	$(BIN)/python tests/gpu/check.py

bench: venv  ## the packer against its peers, and whole syncs; figures, plots and goals under runs/bench/
	mkdir -p runs/bench
	$(BIN)/grpo-lab bench pack --json runs/bench/pack.json --plot runs/bench/pack.svg
	$(BIN)/grpo-lab bench sync --json runs/bench/sync.json --plot runs/bench/sync.svg
