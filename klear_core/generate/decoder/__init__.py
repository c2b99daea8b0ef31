"""Sample from the Llama, Qwen2 and Qwen3 families on CPU and CUDA, without vLLM."""
