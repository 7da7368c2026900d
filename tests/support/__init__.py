"""Builders, fakes and servers that several rooms' tests use."""
