"""Compute attention and fused layers: compiled C on CPU, torch.compile on CUDA."""
