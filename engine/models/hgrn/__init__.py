"""HGRN (arXiv 2311.04823): models of flash-linear-attention's `HGRNForCausalLM`."""
