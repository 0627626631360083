"""Studies: questions about methods, answered by grids of lab runs. See `studies.harness`."""
