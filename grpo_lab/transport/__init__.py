"""How weights and requests travel.

Weights: shared memory, gloo, and a pair within one process. Requests: HTTP.
"""
