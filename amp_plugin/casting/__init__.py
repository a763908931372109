"""The autocast core: it decides the dtype in which each op runs."""
