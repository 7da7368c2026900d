"""The event-driven engine: a simulated cluster that carries out the plans of the live round."""
