"""``/metrics`` in Prometheus' text format, under vLLM's names."""

from __future__ import annotations

from grpo_lab.engine.core import EngineCore


def render(core: EngineCore, model: str) -> str:
    """Gauges and counters of one engine; labels as vLLM has them."""
    label = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    labels = f'engine="0",model_name="{label}"'
    scheduler, counters = core.scheduler, core.counters
    pool = scheduler.pool
    rows = [
        ("num_requests_running", "gauge", "Requests in the running batch.", len(scheduler.running)),
        ("num_requests_waiting", "gauge", "Requests waiting to be scheduled.", core.num_waiting),
        ("kv_cache_usage_perc", "gauge", "Used KV blocks, 1 is all.", pool.num_used / len(pool)),
        ("prefix_cache_queries_total", "counter", "Prompt tokens looked up.", counters.prefix_queries),
        ("prefix_cache_hits_total", "counter", "Prompt tokens found.", counters.prefix_hits),
        ("num_preemptions_total", "counter", "Preemptions by recompute.", scheduler.num_preemptions),
        ("prompt_tokens_total", "counter", "Prefill tokens processed.", counters.prompt_tokens),
        ("generation_tokens_total", "counter", "Tokens generated.", counters.generation_tokens),
        ("engine_steps_total", "counter", "Model steps run.", counters.steps),
    ]
    lines = []
    for name, kind, text, value in rows:
        lines += [f"# HELP vllm:{name} {text}", f"# TYPE vllm:{name} {kind}"]
        lines.append(f"vllm:{name}{{{labels}}} {float(value)!r}")
    name = "request_success_total"
    lines += [f"# HELP vllm:{name} Finished requests.", f"# TYPE vllm:{name} counter"]
    for reason, count in sorted(counters.finished.items()):
        lines.append(f'vllm:{name}{{{labels},finished_reason="{reason}"}} {float(count)!r}')
    return "\n".join(lines) + "\n"
