"""Batches of requests to models: their files, their lines, and the worker that has lines answered where and when it is
cleanest.

Content is kept in PostgreSQL, in chunks: every serving process reads the same, a file and what names it change in one
transaction, and backups have both.
"""
