"""Mamba-2 (arXiv 2405.21060), in the layouts of transformers and mamba_ssm."""
