"""Mixed-integer linear programmes, independent of the solver.

``model`` says what a problem and its solution are, ``solve`` hands a problem to a backend, and ``highs`` is the one
that is always there. Installed packages add others (``services.kit.solvers``). No other room imports such a package.
"""
