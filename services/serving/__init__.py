"""The serving process: plans pools of model servers every half hour, and runs them as planned.

``app`` composes the process, ``endpoints`` speak HTTP, ``service`` holds the use cases. ``planning`` has every pool
planned and puts plans in force, ``worker`` makes the plans, ``controller`` starts, probes, drains and replaces
instances until they match the plan in force. All their state is in the database (``repository``), so any of them may
be killed at any moment.
"""
