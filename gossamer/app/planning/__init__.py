"""What a run will cost and what it did: plans, forecasts, profiles."""
