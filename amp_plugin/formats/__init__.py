"""Makes Linear layers compute in formats below 16 bits with torchao. Each layer can have its own format."""
