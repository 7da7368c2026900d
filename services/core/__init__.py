"""The pure core: decisions without effects.

Nothing in here reads a clock, a file, the environment or a random source, or imports a framework.
The live scheduler and the simulator call the same functions with the same types.
"""
