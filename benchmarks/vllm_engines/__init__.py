"""vLLM engines with layers of Qwen3.8-27B's shapes: this package's parts on and off."""
