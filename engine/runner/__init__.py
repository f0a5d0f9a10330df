"""A step plan on the device: prefill, decode, state pools, CUDA graphs."""
