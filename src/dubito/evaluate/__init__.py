"""How good uncertainties are: `evaluate`, `compare` and selective prediction."""
