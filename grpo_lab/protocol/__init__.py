"""Everything that decides the order of things: plain asyncio on ports.

No module here does I/O, reads a clock other than the event loop's, or imports torch or vllm, so the
same code runs in real processes and in a deterministic simulation.
"""
