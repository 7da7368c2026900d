"""Commands that need no control plane: simulations, plans, profiles and forecasts."""
