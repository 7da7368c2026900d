"""Tests of several processes together: real processes, real servers, kill -9."""
