# The contract of vLLM's RL routes, on the simulation in process, the simulated server and a real vLLM.
.PHONY: conformance conformance-core

conformance: venv $(STAMP_VLLM)  ## every row of the contract on all three engines
	$(BIN)/python tests/conformance/main.py

conformance-core: venv $(STAMP_VLLM)  ## about ten rows, on all three engines
	$(BIN)/python tests/conformance/main.py --core
