"""Explanations of single jobs: why one waits, what it does, what happened to it. Nothing here changes anything."""
