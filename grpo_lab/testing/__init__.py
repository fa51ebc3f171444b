"""For tests of one's own: Hypothesis strategies for simulated clusters, and a search that keeps failures."""
