"""The autocast core, which decides the dtype in which each op runs."""
