"""Executes step plans on the device: prefill, decode, state pools, CUDA graphs."""
