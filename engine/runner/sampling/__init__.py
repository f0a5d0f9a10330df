"""From logits to tokens: logits processors, sampling, log-probabilities."""
