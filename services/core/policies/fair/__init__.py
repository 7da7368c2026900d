"""``fair+``: GPUs shared between tenants by their weights, on top of any policy.

The wrapped policy ranks the jobs as it always does; whose job comes next is decided between tenants
(``services.core.cycle.shares``). What each tenant has used fades with a half-life and is the wrapper's memory. If all
jobs belong to one tenant, the wrapped policy decides alone.
"""
