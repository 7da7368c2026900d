"""As in Ray."""
