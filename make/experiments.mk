# Targets of the ablations. Included by the Makefile, whose VENV, BIN and venv they use.
ABLATIONS := sync_interval pause_mode admission cluster_split faults scale buckets staleness_vs_reward learning_rate_vs_lag
SWEEP_OUT := runs/experiments

.PHONY: experiments experiments-full

experiments: venv  ## every ablation, small grids, 3 seeds: figures and reading guides under runs/experiments/
	$(call sweep_all,--seeds 3,$(SWEEP_OUT))

experiments-full: venv  ## every ablation, full grids, 5 seeds, under runs/experiments-full/ (hours)
	$(call sweep_all,--full --seeds 5,$(SWEEP_OUT)-full)

# All of them run, also when a claim of one does not hold; the last line says how many held, and so does the exit code.
define sweep_all
@missed=""; for name in $(ABLATIONS); do \
	$(BIN)/grpo-lab sweep experiments/$$name.py --resume $(1) --out $(2) || missed="$$missed $$name"; done; \
	test -z "$$missed" && echo "$(words $(ABLATIONS)) experiments, every claim holds: $(2)" \
	|| { echo "not every claim holds, or a run failed:$$missed (see reading.md in $(2))"; exit 1; }
endef
