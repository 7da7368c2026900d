"""Everything on one machine: a real PostgreSQL and a real Valkey from wheels, every process, one supervisor.

`postgres.py` and `valkey.py` own the embedded servers. `processes.py` lists what runs, `supervisor.py` keeps it
running, and `stack.py` is the interface for the command line and the tests.
"""
