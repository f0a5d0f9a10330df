"""The operators' battery: values, gradients, exactness, contracts, on the CPU and on CUDA."""
