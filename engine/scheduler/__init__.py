"""Which tokens the next step reads and which rows it decodes, in plain integers; no torch."""
