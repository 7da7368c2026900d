"""Mixed-integer linear programmes, independent of the solver.

``model`` says what a problem and its solution are, ``solve`` hands a problem to a backend, and each backend is one
module: ``highs`` (the default), ``cbc`` (through PuLP) and ``gurobi`` (falls back to HiGHS where its licence does not
suffice). Nothing else in the project imports a solver's package.
"""
