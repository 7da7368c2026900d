"""The `wattshift` command: a client of the gateway, and the front door of the one-machine set-up.

Tables for people, `--json` for programs. Exit codes: 0 done; 1 a job waited for did not succeed, or a check failed;
2 the command line is wrong; 3 no such thing; 4 the request was refused; 5 the control plane does not answer.
"""
