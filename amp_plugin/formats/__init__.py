"""Linear layers in fewer than 16 bits, by torchao: which formats there are, which layers take which."""
