"""Commands for who may do what: tenants, users, keys, logins, budgets, secrets and webhooks."""
