"""Public helpers for tests of methods, machines and drivers."""
