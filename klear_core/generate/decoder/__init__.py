"""Sample from the Qwen3 family on CPU and CUDA, without vLLM."""
