"""Our own sampler for the Qwen3 family, on CPU and CUDA."""
