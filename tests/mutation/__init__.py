"""Mutation runs: change one thing in the code, run the tests that execute it, and see whether one of them fails.

`./test --mutants` draws a seeded, uniform sample of all mutants of the scope and states the share that is killed with
its interval. `mutants` makes them with mutmut's operators (and a few of ours for SQL), `selection` finds the tests
that execute a line, `worker` runs them on a copy of the sources, `results` counts.

Why not mutmut's own runner: it leaves out every decorated function (properties, endpoints), class bodies and
constants, has no sampling, and puts each function behind a trampoline. Why not cosmic-ray's: it runs one fixed test
command per mutant, and all of ours take minutes.
"""
