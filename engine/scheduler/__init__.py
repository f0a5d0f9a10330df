"""Decides which tokens the next round reads and which rows it decodes; integers only, no torch."""
