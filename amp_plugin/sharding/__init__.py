"""Plans the dtypes of a sharded model, and reports the dtypes that torch really uses."""
