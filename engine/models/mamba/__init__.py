"""Mamba (arXiv 2312.00752) and Falcon-Mamba, in the layouts of transformers and mamba_ssm."""
