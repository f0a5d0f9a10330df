"""How a model's steps are computed on each device."""
