"""Programs that measure: each `bench_*.py` has a `main()` that prints and writes JSON into results/benchmarks/."""
