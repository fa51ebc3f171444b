# Targets of the ablations. Included by the Makefile, whose VENV, BIN, STAMP and venv they use.
ABLATIONS := sync_interval pause_mode admission cluster_split faults scale buckets staleness_vs_reward learning_rate_vs_lag
SWEEP_OUT := runs/experiments
RAY_STAMP := $(VENV)/.ray-stamp

.PHONY: experiments experiments-full experiments-dry-run

experiments: venv  ## every ablation, small grids, 3 seeds: figures and reading guides under runs/experiments/
	$(call sweep_all,--seeds 3 --resume --out $(SWEEP_OUT),every claim holds: $(SWEEP_OUT))

experiments-full: venv  ## every ablation, full grids, 5 seeds, under runs/experiments-full/ (hours)
	$(call sweep_all,--full --seeds 5 --resume --out $(SWEEP_OUT)-full,every claim holds: $(SWEEP_OUT)-full)

experiments-dry-run: venv  ## two points of every full grid, and about how long experiments-full takes; keeps nothing
	$(call sweep_all,--full --seeds 5 --dry-run,all of them can run)

# All of them run, also when a claim of one does not hold; the last line says how many held, and so does the exit code.
define sweep_all
@missed=""; for name in $(ABLATIONS); do \
	$(BIN)/grpo-lab sweep experiments/$$name.py $(1) || missed="$$missed $$name"; done; \
	test -z "$$missed" && echo "$(words $(ABLATIONS)) experiments, $(2)" \
	|| { echo "a claim does not hold, or a run failed:$$missed (see reading.md beside the results)"; exit 1; }
endef

# The tests of sweeps on Ray are skipped without it.
nightly: $(RAY_STAMP)

$(RAY_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt ray
	@touch $(RAY_STAMP)

# What the gallery of docs/experiments.md shows; newest results of `make experiments`.
GALLERY := sync_interval/sync_interval pause_mode/pause_mode admission/admission_128 cluster_split/cluster_split_queue_8 \
	faults/faults scale/scale buckets/sync_time staleness_vs_reward/accuracy_by_bound learning_rate_vs_lag/drift

.PHONY: experiments-gallery
experiments-gallery:  ## copy the gallery's figures from runs/experiments/ to docs/figures/
	for figure in $(GALLERY); do cp $(SWEEP_OUT)/$$figure.png docs/figures/$$(dirname $$figure).png; done
