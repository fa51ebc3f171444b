"""The simulated vLLM: scheduler, block pool, policy and RL state machine behind one ASGI app.

Plain ``asyncio`` on the running loop's clock, so that the same engine runs under uvicorn in real time
and on a virtual-time loop in a simulation. It imports neither the trainer nor a transport: weight
receivers are injected.
"""
