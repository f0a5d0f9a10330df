"""Load tests and measurements: every figure that the README claims comes from a script here."""
