"""Mixed-integer linear programmes, apart from who solves them.

``model`` says what a problem and its solution are, ``solve`` hands a problem to a backend, and each backend is one
module: ``highs`` (the default), ``cbc`` (through PuLP), ``gurobi`` (falls back to HiGHS where its licence does not
reach) and ``exhaustive`` (the referee of small cases). Nothing else in the house imports a solver's package.
"""
