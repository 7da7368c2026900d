"""Explanations of jobs: why one waits, how it runs, what happened to it; and the live state for the what-if service.

Nothing here changes anything.
"""
