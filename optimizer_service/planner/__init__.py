"""Keeps pools of model servers as planned.

``plans`` has every pool planned each half hour and puts plans in force; ``keeper`` starts and drains instances until
they are as the plan in force says. All they go by is in the database, so that any of them may be killed anywhere.
"""
