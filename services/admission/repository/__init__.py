"""All SQL of admission.

``jobs`` reads and changes single jobs, ``submissions`` accepts many in one transaction, ``accounts`` counts what
tenants may still submit, ``access`` and ``audit`` are tenants, keys and the audit log, ``events`` reads the events.
"""
