# Targets of the packer. Included by the Makefile, whose VENV, BIN and venv they use.
PACKING_TESTS := $(wildcard tests/unit/test_packing*.py tests/property/test_packing*.py)

.PHONY: sanitize arm-check gpu-check bench

sanitize: venv  ## the packer's tests under AddressSanitizer and UBSan, its threads under ThreadSanitizer
	$(BIN)/python tests/sanitize.py $(PACKING_TESTS)

ARM_SOURCES := csrc/tests/stress.cpp $(addprefix csrc/,geometry.cpp hash.cpp kernels.cpp kernels_plain.cpp packer.cpp pool.cpp)

arm-check:  ## the packer's C++ compiled for AArch64 and run under qemu (Debian: g++-aarch64-linux-gnu, qemu-user-static)
	mkdir -p build
	aarch64-linux-gnu-g++ -std=c++17 -O3 -Wall -Wextra -Wconversion -Werror -ffp-contract=off -static $(ARM_SOURCES) -o build/stress-aarch64
	qemu-aarch64-static build/stress-aarch64

gpu-check: venv  ## what needs a GPU: the CUDA packer's tests, compute-sanitizer, rates
	$(BIN)/python tests/gpu/check.py

bench: venv  ## the packer against its peers, and whole syncs; figures, plots and goals under runs/bench/
	mkdir -p runs/bench
	$(BIN)/grpo-lab bench pack --json runs/bench/pack.json --plot runs/bench/pack.svg
	$(BIN)/grpo-lab bench sync --json runs/bench/sync.json --plot runs/bench/sync.svg
