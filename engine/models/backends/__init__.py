"""Implementations of the models for each kind of device, and the choice among them."""
