"""grpo_lab's own headers and routes beside vLLM's: one spelling for clients and servers."""

CAUSE_HEADER = "x-grpo-lab-cause"
PLAN_HEADER = "x-grpo-lab-plan"
TERM_HEADER = "x-grpo-lab-term"
SYNC_HEADER = "x-grpo-lab-sync"
KIND_HEADER = "x-grpo-lab-kind"
LEASE_HEADER = "x-grpo-lab-lease"  # on /pause, seconds: resume when its sender is silent for longer

CAPABILITIES_PATH = "/grpo_lab/capabilities"
SCORE_PATH = "/grpo_lab/score"
ABANDON_PATH = "/grpo_lab/abandon_weight_update"
