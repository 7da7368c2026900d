"""Tests of the one-machine installation: real servers, real child processes, real signals."""
