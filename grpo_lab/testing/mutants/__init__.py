"""Planted faults, most of them from reports about real systems: each must be caught by a rule.

A mutant replaces one part of a fixture (a cluster in virtual time, ranks of a trainer, a configuration)
by a subclass with a fault. ``grpo-lab mutants`` searches each fixture until a rule fires; the correct
protocol goes through the same searches and must stay clean.
"""
