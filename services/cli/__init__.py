"""The `wattshift` command: a client of the gateway, and of the installation on one machine.

Tables for people, `--json` for programs. Exit codes: 0 success; 1 a job waited for did not succeed, or a check failed;
2 the command line is wrong; 3 not found; 4 the request was refused; 5 the control plane does not answer.
"""
