"""One plan of dtypes for a sharded model, what torch makes of it, and what its collectives carry."""
