"""What an experiment found: tables as CSV, and one HTML page that needs nothing beside it.

``tables`` compares cells with the baseline and separates the causes, ``charts`` draws (inline SVG), ``page`` lays
out, ``markdown`` writes the tables of ``docs/results``.
"""
