"""Words by which vLLM's worker and its API server understand each other: only text passes between them."""

ABANDON_KEY = "grpo_lab_abandon"  # in an update_info: fail, so that vLLM closes the session
ABANDONED = "grpo_lab: the weight update was abandoned"
TORN = "grpo_lab: weights torn"  # the load itself failed: neither the old nor the new weights are there
