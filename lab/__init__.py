"""What only compares and remakes papers: other policies, bounds, recipes, experiments and reports.

It imports the product and is imported by none of it. Its distribution, ``wattshift-lab``, adds its policies by the
entry points that other packages use.
"""
