"""Makes Linear layers compute in formats below 16 bits by torchao, with a choice of format per layer."""
