"""Linear layers that compute in formats below 16 bits, by torchao, and the choice of a format per layer."""
