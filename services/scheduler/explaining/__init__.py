"""Explanations of jobs: why one waits, what it does, what happened to it; and the live state for the what-if service.

Nothing here changes anything.
"""
