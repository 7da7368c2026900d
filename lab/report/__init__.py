"""What an experiment found: tables as CSV, and one HTML page that needs nothing beside it.

``tables`` compares cells with the baseline and separates the causes, ``page`` lays out, ``markdown`` writes the tables
of ``lab/results``. The product's bars are in ``services.cli.reports.charts``.
"""
